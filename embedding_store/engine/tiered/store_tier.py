"""A store's side of its tier: its tables there, what is written behind, and how the store comes back."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.tier import Records, Tier, TierTable
from elastable.embedding_store.engine.memory_table import MemoryTable
from elastable.embedding_store.engine.store_history import ChangeLog, ReplayedTables
from elastable.embedding_store.engine.tiered.store_state import StoreState
from elastable.embedding_store.engine.tiered.tiered_table import Captured, TieredTable, TierNames
from elastable.embedding_store.errors import SpecConflict, StaleVersion, StoreBroken, StoreFailed
from elastable.embedding_store.log.changes import CommitImages, CreateTable, ResetVersion
from elastable.embedding_store.log.contract import Log
from elastable.embedding_store.log.inspection import entry_of_version
from elastable.embedding_store.measures import Counts
from elastable.embedding_store.native.slab import SlabMaker, anonymous_slab
from elastable.embedding_store.support.memory_budget import RowBudget
from elastable.embedding_store.support.readers_writer_lock import ReadersWriterLock

_CHUNK_BYTES = 8 << 20
_ALL_DIRECT = 1 << 62
_NEAR_ROWS = 1 << 14  # rows that lookups have read, until they are given frames
_WAIT_S = 600.0  # for a write that is under way: it has its own, shorter deadline


class StoreTier(ChangeLog):
    """The tables of one store in a tier, and the log of their changes.

    Rows are captured while the store is held with other readers, or alone, and written without holding it. One write
    is under way at a time, so that no older value of a row overwrites a newer one. The log is trimmed behind them.

    Attributes:
        tier: Where rows are written.
        log: Where every change is appended before anybody sees it.
        names: Of tables in the tier.
        kept: The state in the tier.
        owned: Whether this process is the one that writes.
        begun: How often the store has begun anew at a state of the tier: kept one, or was brought back to one.
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
        super().__init__(log)
        self.tier = tier
        self.names = TierNames()
        self.begun = 0
        self._closing = closing
        self._new_slab = new_slab
        self._budget = RowBudget(budget)
        self.owned = False
        self._loaded: tuple[int, bytes | None] = 0, None
        self._tables: Mapping[str, MemoryTable] = {}
        self._wanted = Counts()  # rows that lookups and commits have asked for, by table
        self._turn = threading.Condition()
        self._under_way = False
        self._finished: list[tuple[list[Captured], bool]] = []
        self.kept: StoreState | None = None
        self._soiled = False

    @property
    def place(self) -> str:
        return self.tier.place

    def tables(self) -> list[TieredTable]:
        """Those of the store."""
        return [table for table in list(self._tables.values()) if isinstance(table, TieredTable)]

    @property
    def changed(self) -> int:
        """Rows that are not in the tier as they are."""
        return sum(table.changed for table in self.tables())

    def capture(self, cursors: dict[TieredTable, int]) -> list[Captured]:
        """Takes changed rows of tables, some megabytes, from the cursors on, which move; -1: the table is done."""
        captured, left = [], _CHUNK_BYTES
        for table, cursor in cursors.items():
            if cursor < 0 or left <= 0:
                continue
            row_bytes = table.tiered.layout.record_bytes
            some, cursors[table] = table.capture(cursor, max(64, left // row_bytes))
            left -= some.records.rows.nbytes
            if len(some.records.ids) or len(some.gone[0]):
                captured.append(some)
        return captured

    def begin_writing(self) -> None:
        """Waits until nothing is being written; the next write is the caller's, who holds the store.

        Raises:
            StoreFailed: another write does not end.
        """
        with self._turn:
            if not self._turn.wait_for(lambda: not self._under_way, _WAIT_S):
                raise StoreFailed(f"{self.place}: a write has not ended within {_WAIT_S:g} s")
            self._under_way = True
            self._acknowledge()

    def write(self, captured: list[Captured], sequence: int) -> None:
        """Writes what was captured, and ends the turn.

        Raises:
            ElastableError: as `Tier.write`; the rows count as changed again.
        """
        done = False
        try:
            if captured:
                self._soil()
                for some in captured:
                    if not some.behind.there:
                        self._create(some.described)
                        some.behind.there = True
                gone = {some.behind.name: some.gone for some in captured if len(some.gone[0])}
                self.tier.write([some.records for some in captured if len(some.records.ids)], gone, sequence)
            done = True
        finally:
            with self._turn:
                self._finished.append((captured, done))
                self._end_turn()

    def _end_turn(self) -> None:
        self._under_way = False
        self._turn.notify_all()

    def _create(self, table: TierTable) -> None:
        try:
            self.tier.create(table)
        except SpecConflict:  # an earlier call made it, and its answer was lost: names in the tier are given once
            self.tier.drop(table.name)
            self.tier.create(table)

    def acknowledge(self) -> None:
        """Takes note of what was written; the store is held."""
        with self._turn:
            self._acknowledge()

    def wait(self) -> None:
        """Returns once nothing is being written, and takes note of it; the store is held alone.

        Raises:
            StoreFailed: a write does not end.
        """
        self.begin_writing()
        with self._turn:
            self._end_turn()

    def write_all(self) -> None:
        """Writes every changed row now; the caller has the store alone.

        Raises:
            ElastableError: as `Tier.write`.
        """
        cursors = dict.fromkeys(self.tables(), 0)
        while any(cursor >= 0 for cursor in cursors.values()):
            self.begin_writing()
            self.write(self.capture(cursors), self.log.last)
        self.acknowledge()

    def _acknowledge(self) -> None:
        for captured, done in self._finished:
            for some in captured:
                some.table.written(some, done)
        self._finished.clear()

    def describe(self, version: int, record: bytes | None) -> StoreState:
        """The store as it is; it is held."""
        return StoreState(version, self.log.last, record, [table.saved() for table in self.tables()])

    def flush_alone(self, version: int, record: bytes | None) -> None:
        """Writes everything, and keeps the state of the store; the caller has it alone. Raises as `write_all`."""
        self.wait()
        if self.behind:
            state, retired = self.describe(version, record), self.names.retired()
            self.log.sync()
            self.write_all()
            self.keep(state, retired)

    def keep_behind(self, state: StoreState, retired: Sequence[str]) -> None:
        """As `keep`, in a turn that `begin_writing` has begun, and that this ends; the store need not be held."""
        try:
            self.keep(state, retired)
        finally:
            with self._turn:
                self._end_turn()

    def keep(self, state: StoreState, retired: Sequence[str]) -> None:
        """Every row as of `state` is in the tier: keeps the state, and lets go of what it makes unnecessary.

        Args:
            state: What `describe` gave before the rows were captured.
            retired: Tables of the tier that nobody needed any more then.
        """
        complete = self.log.keeps_entries or state.sequence == self.log.last
        self.log.sync()
        self.begun += 1
        self.tier.put_state(replace(state, complete=complete).to_bytes())
        self.kept, self._soiled = state, not complete
        self.log.trim(state.sequence)
        for name in retired:
            self.tier.drop(name)
        self.names.forget(retired)

    def _soil(self) -> None:
        """Before the first write after a state, where no log says what was written since."""
        if not self.log.keeps_entries and not self._soiled:
            state = StoreState(0, 0, None, ()) if self.kept is None else self.kept
            self.tier.put_state(replace(state, complete=False).to_bytes())
            self._soiled = True

    def new_table(self, spec: TableSpec, direct_bytes: int, stored: str | None = None) -> TieredTable:
        """An empty table; `stored`: its name in the tier, None: a new one. Raises `BadSpec`."""
        return TieredTable(
            spec, direct_bytes, self._new_slab, self.tier, self.names, self._budget, self._make_clean, stored=stored
        )

    def before_lookup(self, wanted: Sequence[tuple[str, Int64]], lock: ReadersWriterLock) -> None:
        """Reads cold rows of all tables of a lookup at once, where that pays, and gives frames to rows that came again.

        Args:
            wanted: Names of tables, and ids int64 `[n]` that are looked up there.
            lock: Of the store, which is not held.

        Raises:
            StoreBroken, StoreFailed, Unavailable, DeadlineExceeded: as `Tier.read`.
        """
        for name, ids in wanted:
            if name in self._tables:
                self._wanted.add(name, by=len(ids))
        tables = self.tables()
        if all(table.tiered.whole for table in tables):
            return
        swollen = [(table, table.tiered) for table in tables if table.tiered.swollen]
        if swollen:
            with lock.writing():
                for table, rows in swollen:
                    if table.tiered is rows:
                        rows.shrink()
        if not self.tier.far:
            again = [(table, rows, rows.read_again()) for table in tables if (rows := table.tiered).unsettled]
            if again:
                with lock.writing():
                    for table, rows, positions in again:
                        if table.tiered is rows:  # the table was not cleared since
                            rows.settle(positions)
            return
        if sum(table.tiered.prefetched.rows for table in tables) > _NEAR_ROWS:
            with lock.writing():
                for table in tables:
                    table.tiered.admit_prefetched()
        with lock.reading():
            self.read_ahead([(self._tables.get(name), ids) for name, ids in wanted])

    def before_commit(self, changed: Sequence[tuple[MemoryTable, Int64]]) -> None:
        """Reads cold rows of all tables of a commit at once, where that pays; the store is held alone.

        `changed`: tables, and ids int64 `[n]` of the rows that are to change.
        """
        for table, ids in changed:
            self._wanted.add(table.spec.name, by=len(ids))
        if self.tier.far:
            self.read_ahead(changed)

    def row_counts(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """`StoreMeasures.rows_wanted` and `rows_read`."""
        tables = [(name, table) for name, table in list(self._tables.items()) if isinstance(table, TieredTable)]
        return self._wanted.by_name(), {name: table.behind.reads.value for name, table in tables}

    @property
    def pressed(self) -> bool:
        """Whether so many rows of a table have changed that soon there is no memory for others."""
        return any(table.tiered.pressed for table in self.tables())

    def read_ahead(self, wanted: Sequence[tuple[MemoryTable | None, Int64]]) -> None:
        """Reads what is neither in memory nor near, of all tables at once; the store is held with other readers.

        Args:
            wanted: Tables (others than tiered ones are passed over), and ids int64 `[n]`, which may repeat.

        Raises:
            StoreBroken, StoreFailed, Unavailable, DeadlineExceeded: as `Tier.read`.
        """
        asked: list[tuple[TieredTable, Records]] = []
        for table, ids in wanted:
            if isinstance(table, TieredTable) and (records := table.bring(ids)) is not None:
                asked.append((table, records))
        if asked:
            missing = self.tier.read([records for _, records in asked])
            for (table, records), lost in zip(asked, missing, strict=True):
                table.brought(records, lost)

    def _make_clean(self) -> None:
        """As `write_all`, where this process is the one that writes; elsewhere rows need more memory instead."""
        if self.owned:
            self.write_all()

    @property
    def behind(self) -> bool:
        """Whether the tier lacks anything that the store has; the store is held."""
        return self.kept is None or self.kept.sequence != self.log.last or bool(self.changed)

    def replay(self, tables: ReplayedTables) -> None:
        self.wait()
        self.begun += 1
        self._tables = tables.tables
        known = self.tier.tables()
        content = self.tier.state()
        state = None if content is None else StoreState.from_bytes(content, self.place)
        stored = {saved.stored for saved in state.tables} if state is not None else set()
        self.names = TierNames(stored.union(known))
        self.kept, self._soiled = state, state is not None and not state.complete
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
        rows = {} if state is None else {saved.spec.name: saved.rows for saved in state.tables}
        self._replay_log(tables, begin, rows)

    def _replay_log(self, tables: ReplayedTables, begin: int, rows: dict[str, int]) -> None:
        """Applies the entries after `begin`; `rows`: how many each table has, as the state or a commit last said."""
        for entry in self.log.entries(after=begin):
            change = tables.apply_encoded(entry.payload, entry.version, f"{self.place}: entry {entry.sequence}")
            if isinstance(change, CommitImages):
                rows.update({images.table: images.rows for images in change.tables})
            elif not isinstance(change, ResetVersion):  # which tells of none
                rows.pop(change.spec.name if isinstance(change, CreateTable) else change.table, None)
        for name, expected in rows.items():
            count = tables.tables[name].count if name in tables.tables else expected
            if count != expected:
                raise StoreBroken(
                    f"{self.place}: table {name!r} has {count} rows and should have {expected}: rows are lost, or "
                    "another program has deleted or written some. Go back to a checkpoint"
                )

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
        self.wait()
        keep = 0 if self.kept is None else self.kept.sequence
        if self.kept is not None and self.kept.version > version:
            raise StaleVersion(f"{self.place} holds no version {version}: version {self.kept.version} is written")
        keep, rows = entry_of_version(self.log, keep, version)
        if self.tier.sequence > keep:
            raise StaleVersion(f"{self.place} holds no version {version}: rows of later versions are written")
        self.log.truncate(keep)
        return rows

    def own(self) -> bool:
        """Makes this process the only one that writes; returns whether another one has changed anything meanwhile."""
        if self.owned:
            return False
        self.tier.take_over()
        self.log.refresh()
        self.owned = True
        return (self.log.last, self.tier.state()) != self._loaded

    def drop_unclean(self) -> None:
        """Deletes what the tier holds, if it has no log and was not closed cleanly. Raises as `Tier.put_state`."""
        content = self.tier.state()
        if content is not None and not StoreState.from_bytes(content, self.place).complete:
            for name in self.tier.tables():
                self.tier.drop(name)
            self.tier.put_state(StoreState(0, self.tier.sequence, None, ()).to_bytes())

    def close(self) -> None:
        if self._closing is not None:
            self._closing()
            return
        try:
            self.log.close()
        finally:
            self.tier.close()
