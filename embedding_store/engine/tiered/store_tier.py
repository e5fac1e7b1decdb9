"""A store's side of its tier: its tables there, what is written behind, and how the store comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.tier import Records, Tier
from elastable.embedding_store.engine.history.replaying import ReplayedTables
from elastable.embedding_store.engine.tiered.expected_rows import ExpectedRows
from elastable.embedding_store.engine.tiered.store_state import StoreState
from elastable.embedding_store.engine.tiered.tier_names import TierNames
from elastable.embedding_store.engine.tiered.tier_writer import TierWriter
from elastable.embedding_store.engine.tiered.tiered_table import TieredTable
from elastable.embedding_store.errors import BadInput, StaleVersion, StoreBroken, VersionError
from elastable.embedding_store.log.changes import Change, decode_change, encode_change
from elastable.embedding_store.log.contract import Log
from elastable.embedding_store.log.inspection import entry_of_version
from elastable.embedding_store.native.slab import SlabMaker, anonymous_slab
from elastable.embedding_store.support.memory_budget import RowBudget

__all__ = ["StoreTier"]

_CHUNK_BYTES = 8 << 20
_ALL_DIRECT = 1 << 62
_WAIT_S = 600.0  # for a write that is under way: it has its own, shorter deadline


class StoreTier(TierWriter):
    """The tables of one store in a tier, and the log of their changes.

    Attributes:
        names: Of tables in the tier.
    """

    def __init__(
        self,
        tier: Tier,
        log: Log,
        budget: int,
        new_slab: SlabMaker = anonymous_slab,
        closing: Callable[[], None] | None = None,
    ) -> None:
        """Reads nothing yet.

        Args:
            tier, log: Of the store.
            budget: Bytes of memory for the rows of all tables.
            new_slab: Makes their memory, while all rows have room.
            closing: Closes tier and log; None: their own methods do.
        """
        super().__init__(tier, log)
        self._closing = closing
        self._new_slab = new_slab
        self.names = TierNames()
        self._budget = RowBudget(budget)
        self._owned = False
        self._loaded: tuple[int, bytes | None] = 0, None

    def new_table(self, spec: TableSpec, direct_bytes: int, stored: str | None = None) -> TieredTable:
        """An empty table; `stored`: its name in the tier, None: a new one. Raises `BadSpec`."""
        return TieredTable(
            spec, direct_bytes, self._new_slab, self.tier, self.names, self._budget, self._make_clean, stored=stored
        )

    def read_ahead(self, wanted: Sequence[tuple[TieredTable, Int64]]) -> None:
        """Reads what is neither in memory nor near, of all tables at once; the store is held with other readers.

        Args:
            wanted: Tables, and ids int64 `[n]` that are looked up there; they may repeat.

        Raises:
            StoreBroken, StoreFailed, Unavailable, DeadlineExceeded: as `Tier.read`.
        """
        asked: list[tuple[TieredTable, Records]] = []
        for table, ids in wanted:
            records = table.bring(ids)
            if records is not None:
                asked.append((table, records))
        if asked:
            missing = self.tier.read([records for _, records in asked])
            for (table, records), lost in zip(asked, missing, strict=True):
                table.brought(records, lost)

    def _make_clean(self) -> None:
        """As `write_all`, where this process is the one that writes; elsewhere rows need more memory instead."""
        if self._owned:
            self.write_all()

    @property
    def owned(self) -> bool:
        """Whether this process is the one that writes."""
        return self._owned

    @property
    def behind(self) -> bool:
        """Whether the tier lacks anything that the store has; the store is held."""
        return self.kept is None or self.kept.sequence != self.log.last or bool(self.changed)

    def append(self, change: Change, version: int) -> None:
        """Appends a change, after which the store has this version. Raises as `Log.append`."""
        self.log.append(self.log.last + 1, version, encode_change(change) if self.log.keeps_entries else ())

    @property
    def keeps_entries(self) -> bool:
        """As `Log.keeps_entries`."""
        return self.log.keeps_entries

    @property
    def wants_base(self) -> bool:
        """Whether a new base should be written: the tier is the base."""
        return False

    def begin_base(self, snapshot: Snapshot, specs: Sequence[TableSpec], record: bytes | None) -> None:
        """As `wants_base`."""

    def abandon_base(self) -> None:
        """As `wants_base`."""

    def refresh(self) -> None:
        """As `Log.refresh`."""
        self.log.refresh()

    def replay(self, tables: ReplayedTables) -> None:
        """Brings empty tables to the last version.

        Raises:
            StoreBroken: tier or log are corrupt, or one has lost what the other needs.
        """
        self.wait()
        self.begun += 1
        self._tables = lambda: tables.tables
        known = self.tier.tables()
        content = self.tier.state()
        state = None if content is None else StoreState.from_bytes(content, self.place)
        stored = {saved.stored for saved in state.tables} if state is not None else set()
        self.names = TierNames(stored.union(known))
        self._state, self._soiled = state, state is not None and not state.complete
        begin = 0 if state is None else state.sequence
        self._require_log(begin)
        self._loaded = self.log.last, content  # a log that keeps nothing begins there now
        if state is not None:
            tables.version, tables.record = state.version, state.record
            for saved in state.tables:
                table = self.new_table(saved.spec, _ALL_DIRECT if saved.direct else 0, saved.stored)
                tables.tables[saved.spec.name] = table
                table.load(saved, known.get(saved.stored))
        for name in set(known) - stored:
            self.names.retire(name)  # made after the state: the log has all of its rows
        expected = ExpectedRows(state)
        for entry in self.log.entries(after=begin):
            try:
                change = decode_change(entry.payload)
                tables.apply(change, entry.version)
            except (BadInput, VersionError, StoreBroken) as error:
                raise StoreBroken(f"{self.place}: entry {entry.sequence} cannot be applied: {error}") from error
            expected.follow(change)
        expected.require(tables.tables, self.place)

    def _require_log(self, begin: int) -> None:
        """Raises `StoreBroken` unless the log holds every entry after `begin` that rows in the tier may include."""
        log = self.log
        if not log.keeps_entries:
            if self._soiled:
                raise StoreBroken(
                    f"{self.place} was not closed cleanly and has no log, so its rows may be of different versions: "
                    "restore a checkpoint, into an empty store or with unclean=drop, which drops what this one holds"
                )
            log.truncate(begin)
            return
        if log.last < begin:
            raise StoreBroken(
                f"{self.place} includes log entries up to {begin}, but the log ends with {log.last}: it was lost or "
                "is another store's; restore a checkpoint into an empty store"
            )
        if log.first > begin + 1:
            raise StoreBroken(
                f"{self.place} includes log entries up to {begin}, but the log begins with {log.first}: rows that "
                "were written are lost; restore a checkpoint into an empty store"
            )
        if self.tier.sequence > log.last:
            raise StoreBroken(
                f"{self.place} has rows of log entry {self.tier.sequence}, but the log ends with {log.last}: the end "
                "of the log is lost; restore a checkpoint into an empty store"
            )

    def take_back(self, version: int) -> int:
        """Takes the changes after a version back from the log; returns how many rows they had written.

        Raises:
            StaleVersion: the log does not reach back so far, or the tier has rows of later changes.
        """
        self.wait()
        keep = 0 if self._state is None else self._state.sequence
        if self._state is not None and self._state.version > version:
            raise StaleVersion(f"{self.place} holds no version {version}: version {self._state.version} is written")
        keep, rows = entry_of_version(self.log, keep, version)
        if self.tier.sequence > keep:
            raise StaleVersion(f"{self.place} holds no version {version}: rows of later versions are written")
        self.log.truncate(keep)
        return rows

    def own(self) -> bool:
        """Makes this process the only one that writes; returns whether another one has changed anything meanwhile."""
        if self._owned:
            return False
        self.tier.take_over()
        self.log.refresh()
        self._owned = True
        return (self.log.last, self.tier.state()) != self._loaded

    def drop_unclean(self) -> None:
        """Deletes what the tier holds, if it has no log and was not closed cleanly. Raises as `Tier.put_state`."""
        content = self.tier.state()
        if content is not None and not StoreState.from_bytes(content, self.place).complete:
            for name in self.tier.tables():
                self.tier.drop(name)
            self.tier.put_state(StoreState(0, self.tier.sequence, None, ()).to_bytes())

    def close(self) -> None:
        """Closes tier and log. Closing twice is harmless."""
        if self._closing is not None:
            self._closing()
            return
        try:
            self.log.close()
        finally:
            self.tier.close()
