"""A store's side of its tier: its tables there, what is written behind, and how the store comes back."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from secrets import token_hex

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import FlushStatus
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.tier import Records, Tier, TierTable
from elastable.embedding_store.engine.memory_table import MemoryTable
from elastable.embedding_store.engine.store_history import ChangeLog, ReplayedTables
from elastable.embedding_store.engine.table_tier import Captured, TableTier, TierNames
from elastable.embedding_store.engine.tiered.store_state import StoreState
from elastable.embedding_store.errors import (
    DeadlineExceeded,
    ElastableError,
    SpecConflict,
    StaleVersion,
    StoreBroken,
    StoreFailed,
    Unavailable,
)
from elastable.embedding_store.log.acknowledged import AcknowledgedFile, Noted
from elastable.embedding_store.log.changes import CommitImages, CreateTable, ResetVersion
from elastable.embedding_store.log.contract import Log
from elastable.embedding_store.log.inspection import entry_of_version
from elastable.embedding_store.measures import Counts
from elastable.embedding_store.native.slab import SlabMaker, anonymous_slab
from elastable.embedding_store.support.memory_budget import RowBudget
from elastable.embedding_store.support.readers_writer_lock import ReadersWriterLock

_log = logging.getLogger(__name__)

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
        acknowledged: AcknowledgedFile | None = None,
    ) -> None:
        """Reads nothing yet.

        Args:
            tier, log: Of the store.
            budget: Bytes of memory for the rows of all tables.
            new_slab: Makes their memory, while all rows have room.
            closing: Closes tier and log; None: their own methods do.
            acknowledged: Where it is noted what was appended; None: nowhere.
        """
        super().__init__(log, AcknowledgedFile(None) if acknowledged is None else acknowledged)
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

    @property
    def identity(self) -> str:
        return "" if self.kept is None else self.kept.identity

    def tables(self) -> list[tuple[MemoryTable, TableTier]]:
        """Those of the store, and what each has in the tier."""
        return [(table, table.tier) for table in list(self._tables.values()) if table.tier is not None]

    @property
    def changed(self) -> int:
        """Rows that are not in the tier as they are, deleted ones included."""
        return sum(table.rows.changed + tier.gone for table, tier in self.tables())

    def capture(self, cursors: dict[tuple[MemoryTable, TableTier], int]) -> list[Captured]:
        """Takes changed rows of tables, some megabytes, from the cursors on, which move; -1: the table is done."""
        captured, left = [], _CHUNK_BYTES
        for (table, tier), cursor in cursors.items():
            if cursor < 0 or left <= 0:
                continue
            most = max(64, left // table.rows.layout.record_bytes)
            some, cursors[table, tier] = tier.capture(table.rows, table.members, cursor, most)
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
        tables, identity = [table.flushed(tier) for table, tier in self.tables()], self.identity or token_hex(8)
        return StoreState(version, self.log.last, record, tables, identity=identity)

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
        if self.log.keeps_entries:
            self.acknowledged.identify(state.identity)
        else:
            self.acknowledged.put(Noted(state.version, state.sequence, 0, state.identity))
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

    def new_table(self, spec: TableSpec, direct_bytes: int, stored: str | None = None) -> MemoryTable:
        """An empty table; `stored`: its name in the tier, None: a new one. Raises `BadSpec`."""

        def new_tier(spec: TableSpec, row_ids: Callable[[], Int64]) -> TableTier:
            return TableTier(spec, self.tier, self.names, self._budget, row_ids, self._make_clean, stored)

        return MemoryTable(spec, direct_bytes, self._new_slab, new_tier)

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
        tables = [table for table, _ in self.tables()]
        if all(table.rows.whole for table in tables):
            return
        swollen = [(table, table.rows) for table in tables if table.rows.swollen]
        if swollen:
            with lock.writing():
                for table, rows in swollen:
                    if table.rows is rows:
                        rows.shrink()
        if not self.tier.far:
            again = [(table, rows, rows.missed.again()) for table in tables if (rows := table.rows).unsettled]
            if again:
                with lock.writing():
                    for table, rows, positions in again:
                        if table.rows is rows:  # the table was not cleared since
                            rows.settle(positions)
            return
        self.bring_near(wanted, lock)

    def bring_near(self, wanted: Sequence[tuple[str, Int64]], lock: ReadersWriterLock) -> None:
        """Reads cold rows of all tables at once, for a lookup now or later; all else as of `before_lookup`."""
        tables = [table for table, _ in self.tables()]
        if sum(table.rows.prefetched.rows for table in tables) > _NEAR_ROWS:
            with lock.writing():
                for table in tables:
                    table.rows.admit_prefetched()
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
        return self._wanted.by_name(), {table.spec.name: tier.behind.reads.value for table, tier in self.tables()}

    @property
    def pressed(self) -> bool:
        """Whether so many rows of a table have changed that soon there is no memory for others."""
        return any(table.rows.pressed for table, _ in self.tables())

    def read_ahead(self, wanted: Sequence[tuple[MemoryTable | None, Int64]]) -> None:
        """Reads what is neither in memory nor near, of all tables at once; the store is held with other readers.

        Args:
            wanted: Tables (None is skipped), and ids int64 `[n]`, which may repeat.

        Raises:
            StoreBroken, StoreFailed, Unavailable, DeadlineExceeded: as `Tier.read`.
        """
        asked: list[tuple[MemoryTable, TableTier, Records]] = []
        for table, ids in wanted:
            if table is not None and table.tier is not None and (records := table.bring(ids)) is not None:
                asked.append((table, table.tier, records))
        if asked:
            missing = self.tier.read([records for *_, records in asked])
            for (table, tier, records), lost in zip(asked, missing, strict=True):
                tier.behind.require_all(records, lost)
                table.rows.prefetched.add(records.positions, records.rows)

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
        self.acknowledged.require(self.log, Noted.of(self.log, tables.version, self.identity), self.place)

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
        for table, tier in self.tables():
            tier.require_replaced(table.rows, table.directory)

    def _require_log(self, begin: int) -> None:
        """Raises `StoreBroken` unless the log holds every entry after `begin` that rows in the tier may include."""
        log = self.log
        if not log.keeps_entries:
            if self._soiled:
                raise StoreBroken(
                    f"{self.place} was not closed cleanly and has no log, so its rows may be of different versions: "
                    "restore a checkpoint into an empty store"
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
        self.take_back_to(keep, version)
        return rows

    def own(self) -> bool:
        """Makes this process the only one that writes; returns whether another one has changed anything meanwhile."""
        if self.owned:
            return False
        self.tier.take_over()
        self.log.refresh()
        self.owned = True
        return (self.log.last, self.tier.state()) != self._loaded

    def close(self) -> None:
        self.acknowledged.close()
        if self._closing is not None:
            self._closing()
            return
        try:
            self.log.close()
        finally:
            self.tier.close()


# Writing behind: changed rows go to the tier by and by, and the log is trimmed after them


_LOG_SHARE = 2  # a pass begins when the log has grown to one part in so many of what it may take: a hot row that
# changed in many versions is written once, and there is room for what is committed meanwhile
_PAUSE_AFTER_FAILURE_S = 1.0

DEFAULT_EVERY_S = 5.0
"""Seconds between two times that changed rows are written."""


class Flusher:
    """Writes changed rows of a store to its tier on a thread, in passes.

    A pass notes the state of the store, then writes every row that has changed by then, some at a time, as it is when
    its turn comes; at last it keeps the state in the tier and trims the log up to it.
    """

    def __init__(
        self,
        tier: StoreTier,
        lock: ReadersWriterLock,
        state: Callable[[], StoreState],
        may_write: Callable[[], bool],
        *,
        every_s: float,
        log_bytes: int,
        timeout_s: float,
    ) -> None:
        """Begins.

        Args:
            tier: What is written.
            lock: Of the store.
            state: The store as it is; called while the lock is held.
            may_write: Whether its version is one that cannot be taken back any more; likewise.
            every_s: Seconds between two passes, while rows change.
            log_bytes: What the log may take; beyond it, commits wait.
            timeout_s: Seconds that a commit waits for that.
        """
        self._tier, self._lock, self._describe, self._may_write = tier, lock, state, may_write
        self._every_s, self._log_bytes, self._timeout_s = every_s, log_bytes, timeout_s
        self._changed = threading.Condition()
        self._wanted = False
        self._stopping = False
        self._passes = 0
        self._waits, self._waited_s = 0, 0.0
        self._failure: ElastableError | None = None
        self._thread = threading.Thread(target=self._run, name="elastable-flush", daemon=True)
        self._thread.start()

    @property
    def wanted(self) -> bool:
        """Whether it is time for a pass."""
        return self._wanted or self._tier.log.bytes * _LOG_SHARE > self._log_bytes

    def status(self, version: int) -> FlushStatus:
        """How far the tier is behind; the store is held, and has this version."""
        kept, failure = self._tier.kept, self._failure
        flushed = 0 if kept is None else kept.version
        return FlushStatus(
            version,
            flushed,
            self._tier.changed,
            self._tier.log.bytes,
            self._waits,
            self._waited_s,
            None if failure is None else str(failure),
        )

    def wait_for_room(self) -> None:
        """Returns once the log may grow; the store must not be held.

        Raises:
            Unavailable, DeadlineExceeded: the tier cannot be written, or not fast enough.
        """
        if not self._wanted and (self.wanted or self._tier.pressed):
            with self._changed:
                self._wanted = True
                self._changed.notify_all()
        if self._has_room():
            return
        begun = time.monotonic()
        with self._changed:
            self._waits += 1
            there = self._changed.wait_for(lambda: self._stopping or self._has_room(), self._timeout_s)
            self._waited_s += time.monotonic() - begun
        if not there:
            failure = self._failure
            what = f"the log has reached log_bytes ({self._log_bytes:,}), and {self._tier.place} "
            if failure is not None:
                raise Unavailable(f"{what}cannot be written: {failure}") from failure
            raise DeadlineExceeded(f"{what}has not taken enough rows within {self._timeout_s:g} s")

    def _has_room(self) -> bool:
        """Whether the log may grow: it is small enough, or has nothing that the tier lacks, as its last entry stays."""
        kept, log = self._tier.kept, self._tier.log
        return log.bytes <= self._log_bytes or (kept is not None and kept.sequence >= log.last)

    def flush(self, timeout_s: float) -> None:
        """Returns once everything that was committed before is in the tier; the store must not be held.

        Raises:
            ElastableError: it cannot be written.
            DeadlineExceeded: it is not there yet.
        """
        with self._changed:
            # A pass that is under way may have begun before the last commit.
            wanted, self._failure = self._passes + 2, None
            self._wanted = True
            self._changed.notify_all()
            give_up = time.monotonic() + timeout_s
            while self._passes < wanted and self._failure is None and not self._stopping:
                self._wanted = True
                self._changed.notify_all()
                if (
                    not self._changed.wait(min(1.0, max(0.0, give_up - time.monotonic())))
                    and time.monotonic() > give_up
                ):
                    raise DeadlineExceeded(f"{self._tier.place} has not taken every row within {timeout_s:g} s")
            if self._failure is not None:
                raise self._failure

    def stop(self) -> None:
        """Ends the thread, after the write that is under way. Stopping twice is harmless."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        pause = self._every_s
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._stopping, pause)
                if self._stopping:
                    return
                self._wanted = False
            pause = self._every_s
            try:
                self._pass()
                failure = None
            except ElastableError as error:
                failure, pause = error, _PAUSE_AFTER_FAILURE_S
                if self._failure is None:
                    _log.warning("%s: rows are not written, and the log grows: %s", self._tier.place, error)
            except Exception as error:  # noqa: BLE001 - the thread must go on, and commits hear of it
                _log.exception("%s: rows are not written any more", self._tier.place)
                failure = Unavailable(f"writing rows failed: {error!r}")
                pause = _PAUSE_AFTER_FAILURE_S
            with self._changed:
                self._failure = failure
                self._passes += 1
                self._changed.notify_all()

    def _pass(self) -> None:
        with self._lock.reading():
            if not self._may_write():
                return
            self._tier.acknowledge()
            if not self._tier.behind:
                return
            begun, state, retired = self._tier.begun, self._describe(), self._tier.names.retired()
            cursors = dict.fromkeys(self._tier.tables(), 0)
        if self._tier.log.keeps_entries:
            self._tier.log.sync()  # rows must not outlive the log that they come from
        while any(cursor >= 0 for cursor in cursors.values()):
            with self._lock.reading():
                if self._stopping or not self._may_write() or self._tier.begun != begun:
                    return
                self._tier.begin_writing()
                captured, sequence = self._tier.capture(cursors), self._tier.log.last
            self._tier.write(captured, sequence)
        with self._lock.reading():
            if self._tier.begun != begun:  # the state is none of the store's any more, or a newer one is kept
                return
            self._tier.begin_writing()
        self._tier.keep_behind(state, retired)
