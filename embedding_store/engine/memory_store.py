"""The store that keeps its rows in the memory of its process."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache, partial

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import (
    Commit,
    FlushStatus,
    RowBlock,
    StayingRows,
    TableState,
    TableStatistics,
)
from elastable.embedding_store.contract.row_source import LookupRequest, refuse_other_version
from elastable.embedding_store.contract.snapshot import PinStatistics, Snapshot, require_lease
from elastable.embedding_store.contract.spec import TableSpec, refuse_conflict
from elastable.embedding_store.engine.membership import budgets_due
from elastable.embedding_store.engine.memory_table import MemoryTable
from elastable.embedding_store.engine.pins import MemoryPin, PinLease, StorePins
from elastable.embedding_store.engine.staged_commit import StagedCommit, stage_commit, time_of
from elastable.embedding_store.engine.store_history import (
    DEFAULT_LOG_BYTES,
    ChangeLog,
    FollowedChange,
    Following,
    ReplayedTables,
)
from elastable.embedding_store.engine.store_tier import DEFAULT_EVERY_S, Flusher, StoreTier
from elastable.embedding_store.errors import (
    BadInput,
    DeadlineExceeded,
    StoreBroken,
    StoreFailed,
    TableNotFound,
    TakenOver,
    Unavailable,
    Unsupported,
)
from elastable.embedding_store.log import changes
from elastable.embedding_store.log.changes import Change, CommitImages
from elastable.embedding_store.measures import Durations, StoreMeasures, carried
from elastable.embedding_store.native.range_pool import SERIAL, RangePool, available_cores
from elastable.embedding_store.native.slab import SlabMaker, anonymous_slab
from elastable.embedding_store.support.futures import at_once
from elastable.embedding_store.support.memory_budget import before_image_bytes_here, direct_bytes_here
from elastable.embedding_store.support.readers_writer_lock import ReadersWriterLock
from elastable.embedding_store.support.retry import Retry
from elastable.embedding_store.tables.checks import (
    require_block,
    require_block_rows,
    require_ids,
    require_numbers,
    require_update,
    require_version,
)
from elastable.embedding_store.tables.table import BaseStore
from elastable.embedding_store.tables.table_reader import TableReader, answer_in_order, answer_requests, look_up

_MOST_THREADS = 8
_BASE_LEASE_S = 600.0

# A server that is started again is back within seconds; a node of a Cluster takes no writes for two more.
_CLOSING_S = 10.0


class MemoryStore(BaseStore):
    """Rows in memory. Lookups share the store, commits have it alone: a lookup sees one version whole, named or not.

    With a history, a change is applied in memory first, and logged before the lock that it was made under is released:
    nobody sees what is not logged. Where logging fails, the store is closed to everybody, and comes back at its last
    logged version when it is opened again. With a tier, cold rows are read from there, and changed ones written behind.
    """

    def __init__(
        self,
        threads: int | None = None,
        *,
        direct_bytes: int | None = None,
        before_image_bytes: int | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """An empty store at version 0.

        Args:
            threads: For large gathers and updates; None: one a core, at most 8. Results do not depend on it.
            direct_bytes: A fixed table up to this size (weights and slots) is laid out whole, row i at position i; a
                larger one only holds the rows that were touched. None: an eighth of the memory here, at least 1 GiB.
                Results do not depend on it.
            before_image_bytes: Of memory, for rows as they were at pinned versions; where they would take more, the
                oldest pin is given up. None: a quarter of the memory here.
            timeout_s: Seconds that a lookup waits for a commit, or a commit for lookups, before `DeadlineExceeded`.
        """
        self._tables: dict[str, MemoryTable] = {}
        self._gone: dict[str, int] = {}  # name -> `MemoryTable.written_once_gone` of a table that was dropped
        self.new_slab: SlabMaker = anonymous_slab
        self._version = 0
        self._record: bytes | None = None
        self._changes = 0  # calls that changed anything
        self._closed = False
        self._phases = Durations()
        self._failure: BaseException | None = None  # that came in the middle of a change
        self._history: ChangeLog | None = None
        self._unlogged: tuple[Commit, Callable[[], CommitImages]] | None = None
        self._not_logged: Exception | None = None  # why not
        self._base_of: tuple[PinLease, int] | None = None  # of the last base, and `_changes` when it began
        self._appender: ThreadPoolExecutor | None = None
        self._tier: StoreTier | None = None
        self._flusher: Flusher | None = None
        self._undecided = False  # the version may be taken back, until the next one is staged
        self._closing_s = 0.0
        self._direct_bytes = direct_bytes_here() if direct_bytes is None else direct_bytes
        most = before_image_bytes_here() if before_image_bytes is None else before_image_bytes
        self._pins = StorePins(self._tables, most)
        self._pool = RangePool(min(available_cores(), _MOST_THREADS) if threads is None else threads)
        self._lock = ReadersWriterLock(timeout_s, "the memory store")

    # Lookups and reads

    def lookup(self, ids: Mapping[str, Int64], version: int | None = None) -> dict[str, Float32]:
        if self._tier is not None:
            self._tier.before_lookup(list(ids.items()), self._lock)
        with self._lock.reading():
            return look_up(self._readers(ids, version), ids, self._pool)

    def read_ahead(self, ids: Mapping[str, Int64]) -> None:
        if self._tier is not None and self._tier.tier.far:
            self._tier.bring_near(list(ids.items()), self._lock)

    def lookup_into(self, requests: Sequence[LookupRequest], version: int | None = None, split: bool = True) -> None:
        """Rows are folded where they lie."""
        if self._tier is not None:
            self._tier.before_lookup([(request.table, request.ids) for request in requests], self._lock)
        with self._lock.reading():
            tables = self._readers([request.table for request in requests], version)
            answer_requests(tables, requests, self._pool if split else SERIAL)

    def lookup_in_order(self, requests: Iterable[LookupRequest], version: int | None) -> Generator[None, None, None]:
        """Where rows may be cold, all requests are taken first, and read at once."""
        if self._tier is not None:
            requests = list(requests)
            self._tier.before_lookup([(request.table, request.ids) for request in requests], self._lock)
        return answer_in_order(self._lock, partial(self._readers, version=version), requests)

    def specs(self) -> dict[str, TableSpec]:
        with self._lock.reading():
            return {name: table.spec for name, table in self._tables.items()}

    def version(self) -> int:
        return self._version

    def wait_for_version(self, version: int, timeout_s: float) -> bool:
        return self._lock.wait_until(lambda: self._version >= version, timeout_s)

    def row_count(self, table: str) -> int:
        with self._lock.reading():
            return self._table(table).count

    def scan(self, table: str, block_rows: int = 65_536) -> Iterator[RowBlock]:
        """A commit between two blocks shows in the later ones."""
        with self._lock.reading():
            found = self._table(table)
        return self._blocks(found, require_block_rows(block_rows))

    def read_rows(self, table: str, ids: Int64) -> RowBlock:
        with self._lock.reading():
            found = self._table(table)
            return found.stored(require_ids(found.spec, ids))

    def table_statistics(self, table: str) -> TableStatistics:
        with self._lock.reading():
            return self._table(table).statistics()

    def table_state(self, table: str) -> TableState:
        with self._lock.reading():
            return self._table(table).state()

    def _readers(self, tables: Iterable[str], version: int | None) -> Sequence[TableReader]:
        """What reads each of the tables at a version; the lock is held.

        Raises:
            TableNotFound, StaleVersion, FutureVersion: as `lookup`.
        """
        found = [self._table(table) for table in tables]
        if version is None or version == self._version:
            return found
        self._pins.require(version, self._version)
        return [table.at(version) for table in found]

    def _blocks(self, table: MemoryTable, block_rows: int) -> Iterator[RowBlock]:
        cursor = 0
        while True:
            with self._lock.reading():
                self._require_open()
                block, cursor = table.scan(cursor, block_rows)
            if not len(block.ids):
                return
            yield block

    @property
    def memory_tables(self) -> Mapping[str, MemoryTable]:
        """All tables by name; read it under the store's lock."""
        return self._tables

    @property
    def broke_off(self) -> bool:
        """Whether a change broke off in its middle, or could not be logged: nobody may read these rows."""
        return self._unlogged is not None or self._failure is not None

    def _table(self, name: str) -> MemoryTable:
        self._require_open()
        table = self._tables.get(name)
        if table is None:
            raise TableNotFound(f"no table {name!r}; tables here: {', '.join(sorted(self._tables)) or 'none'}")
        return table

    def _require_open(self) -> None:
        if self._unlogged is not None:
            version = self._unlogged[0].version
            place = "" if self._history is None else f"; or open {self._history.place} again, at version {version - 1}"
            why = "it is being logged" if self._not_logged is None else str(self._not_logged)
            raise Unavailable(
                f"version {version} is not logged, and nobody may see it before: {why}. Mend that, and whoever "
                f"committed it commits it again (a job does so by itself, until its deadline){place}"
            )
        if self._failure is not None:
            remedy = "restore a checkpoint" if self._history is None else f"open {self._history.place} again"
            raise StoreBroken(
                f"the memory store failed in the middle of a commit; {remedy}: {self._failure}"
            ) from self._failure
        if self._closed:
            raise StoreFailed("the memory store is closed")

    # Pins

    def pin(self, version: int | None = None, lease_s: float = 60.0) -> Snapshot:
        seconds = require_lease(lease_s)
        while True:
            with self._lock.writing():
                self._require_open()
                if not self._base_differs():
                    return self._pin_of(self._pins.take(self._version, version, seconds))
            self._abandon_base()  # a new one begins with a later commit

    def pins(self) -> tuple[PinStatistics, ...]:
        if self._pins.overdue:
            with self._lock.writing():
                self._pins.sweep()
        with self._lock.reading():
            return self._pins.statistics()

    def follow(self) -> tuple[Iterator[FollowedChange], Following]:
        """All that the store holds, and every change from now on, as soon as it is logged.

        Raises:
            Unsupported: it has no log.
        """
        while True:
            with self._lock.writing():
                self._require_open()
                if self._history is None:
                    raise Unsupported("a store in memory without a log cannot be followed: write memory?log=/folder")
                if not self._base_differs():
                    pin = self._pin_of(self._pins.take(self._version, None, _BASE_LEASE_S))
                    specs = [table.spec for table in self._tables.values()]
                    return self._history.follow(pin, specs, self._record)
            self._abandon_base()

    def _pin_of(self, lease: PinLease) -> MemoryPin:
        return MemoryPin(self._lock, self._pool, self._table, self.specs, self._pins, lease)

    # Tables, and rows that are changed by hand

    def create_table(self, spec: TableSpec) -> bool:
        """Raises `BadSpec` for an unknown optimizer."""
        with self._lock.writing():
            self._require_open()
            if self._has_table(spec):  # which changes nothing: the store stays with the process that writes it
                return False
            self._own()
            if self._has_table(spec):  # another process has made it
                return False
            made = self._new_table(spec)
            try:
                self._log(changes.CreateTable(spec))
            except BaseException:
                made.drop()
                raise
            made.follow_gone(self._gone.pop(spec.name, 0))
            self._tables[spec.name] = made
            self._pins.welcome(made)
            return True

    def put(self, table: str, blocks: Iterable[RowBlock]) -> None:
        with self._lock.reading():
            found = self._table(table)
        for block in blocks:
            checked = require_block(found.spec, found.optimizer, block)
            self._make_way()
            with self._changing(table) as found:
                found.make_ready_to_put(checked.ids)
                self._log(changes.PutRows(table, checked))
                with self._whole_or_broken():
                    found.put(checked)

    def delete(self, table: str, ids: Int64) -> int:
        self._make_way()
        with self._changing(table) as found:
            checked = require_ids(found.spec, ids)
            found.make_ready_to_delete(checked)
            self._log(changes.DeleteRows(table, checked))
            with self._whole_or_broken():
                return found.delete(checked)

    def put_table_state(self, table: str, state: TableState) -> None:
        if state.untouched_decay is not None:
            self._abandon_base()
        with self._changing(table) as found:
            if state.untouched_decay is not None:  # of which pins keep no image: it follows steps
                self._pins.refuse_change(f"the decay of other rows of table {table!r} cannot be restored")
            before = found.state()
            found.put_state(state)
            try:
                self._log(changes.PutTableState(table, state))
            except BaseException:
                found.put_state(before)
                raise

    def clear(self, table: str) -> None:
        self._abandon_base()
        with self._changing(table) as found:
            self._pins.refuse_change(f"table {table!r} cannot be cleared")
            self._log(changes.ClearTable(table))
            found.clear()

    def drop_table(self, table: str) -> None:
        self._abandon_base()
        with self._changing(table) as dropped:
            self._pins.refuse_change(f"table {table!r} cannot be dropped")
            self._log(changes.DropTable(table))
            del self._tables[table]
            self._gone[table] = dropped.written_once_gone
            dropped.drop()

    def reset_version(self, version: int, record: bytes | None = None) -> None:
        require_version(version)
        self._abandon_base()
        with self._lock.writing():
            self._own()
            self._pins.refuse_change(f"the version cannot be reset to {version}")
            self._log(changes.ResetVersion(record), version)
            self._version, self._record = version, record
            self._changes += 1

    @contextmanager
    def _changing(self, table: str) -> Iterator[MemoryTable]:
        """A table, to be changed by the process that writes to the store, which is held alone."""
        with self._lock.writing():
            self._require_open()
            self._own()
            yield self._table(table)
            self._changes += 1

    def _has_table(self, spec: TableSpec) -> bool:
        """Whether the table is there; raises `SpecConflict` where it has another spec."""
        known = self._tables.get(spec.name)
        if known is not None:
            refuse_conflict(known.spec, spec)
        return known is not None

    def _new_table(self, spec: TableSpec) -> MemoryTable:
        if self._tier is not None:
            return self._tier.new_table(spec, self._direct_bytes)
        return MemoryTable(spec, self._direct_bytes, self.new_slab)

    @contextmanager
    def _whole_or_broken(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._failure = error  # rows of two versions: nobody may read them, or change them again
            raise

    # Commits: everything that can fail, then the rows, then the log

    def commit(self, commit: Commit) -> None:
        if self._flusher is not None:
            self._make_way()
        with self._lock.writing():
            if self._tier is not None:
                self._own()
            if self._unlogged is None or not self._log_again(commit):
                self._compute(commit, self._stage(commit))
                self._log_noted(commit)

    def begin_commit(self, commit: Commit) -> Future[None]:
        """The store stays locked until a thread has logged the commit.

        Where nobody can read the version before, it is logged in the caller's thread.
        """
        if self._history is None or not self._history.log.keeps_entries:
            return super().begin_commit(commit)
        self._make_way()
        with ExitStack() as held:
            held.enter_context(self._lock.writing())
            self._own()
            if self._log_again(commit):
                return at_once(None)
            self._compute(commit, self._stage(commit))
            if self._show_ahead(commit.version):
                return self._log_behind(commit, held.pop_all())
            self._log_noted(commit)
        return at_once(None)

    def stage(self, commit: Commit) -> Callable[[], None]:
        """The second half cannot fail, but for the lock."""
        self._make_way()
        with self._lock.writing():
            self._own()
            self._drop_unlogged()
            self._decide()
            staged = self._stage(commit)
            before = self._changes

        def finish() -> None:
            with self._lock.writing():
                if self._log_again(commit):
                    return
                if self._changes != before:
                    raise StoreFailed(f"the memory store was changed while version {commit.version} was staged")
                self._compute(commit, staged)
                self._log_noted(commit)
                self._undecided = True

        return finish

    def staying_rows(self, commit: Commit) -> dict[str, StayingRows]:
        with self._lock.reading():
            self._require_open()
            refuse_other_version(self._version, commit.version - 1)
            due = budgets_due((table.spec for table in self._tables.values()), commit)
            time = time_of(commit, self._tables) or 0.0  # which no other table asks for
            return {name: self._tables[name].staying(commit, time) for name in due}

    def _stage(self, commit: Commit) -> StagedCommit:
        """Everything about a commit that can fail; changes no row."""
        with self._phases.timing("prepare"):
            require_numbers(commit)
            if commit.version - 1 != self._version:
                refuse_other_version(self._version, commit.version - 1)
            updates = []
            for name, update in commit.updates.items():
                table = self._table(name)
                updates.append((table, require_update(table.spec, update)))
            bring = None if self._tier is None else self._tier.before_commit
            return stage_commit(commit, self._tables, updates, bring)

    def _compute(self, commit: Commit, staged: StagedCommit) -> None:
        """Applies a commit, and notes that it is to be logged: until `_log_noted`, nobody changes a row."""
        with self._phases.timing("apply"):
            try:
                if not self._pins.idle:
                    self._pins.sweep()
                staged.apply(self._pool)
            except BaseException as error:
                self._failure = error  # rows of two versions
                raise
            if self._history is not None:
                kept = self._history.log.keeps_entries

                # Copied by whoever logs, who may be another thread: whoever commits need not wait for it.
                @cache
                def images() -> CommitImages:
                    return staged.images(self._pool) if kept else CommitImages(commit.step, ())

                self._unlogged, self._not_logged = (commit, images), None

    # The log

    def keep_history(self, history: ChangeLog) -> None:
        """Brings the empty store to the last version of a history, and adds every later change to it.

        The store closes the history.

        Raises:
            BadInput: the store is not empty.
            StoreBroken: the history is corrupt.
        """
        with self._lock.writing():
            self._require_open()
            if self._tables or self._version or self._history is not None:
                raise BadInput("only an empty memory store can be brought to the version of a history")
            self._replay(history)
            self._history = history
            self._changes += 1

    @property
    def keeps_records(self) -> bool:
        return self._history is not None

    def record(self) -> bytes | None:
        return self._record

    def recover(self, version: int | None = None) -> int:
        if self._tier is not None:
            with self._lock.writing():
                self._own()
        try:
            with self._lock.writing():
                self._drop_unlogged()
            history = self._history
            if history is None or version is None or version != self._version - 1:
                return super().recover(version)
            history.abandon_base()
            with self._lock.writing():
                rows = history.take_back(version)
                self._replay_anew(history, f"the store went back to version {version}")
                return rows
        finally:
            self._undecided = False  # until then, nothing is written of a version that it takes back

    def _log(self, change: Change, version: int | None = None) -> None:
        """Appends a change that is about to be made.

        Raises:
            StoreFailed, Unavailable, DeadlineExceeded: it is not logged, and must not be made.
        """
        if self._history is not None:
            try:
                self._history.append(change, self._version if version is None else version)
            except (StoreBroken, TakenOver) as error:
                self._failure = error
                raise

    def _log_noted(self, commit: Commit) -> None:
        """Logs the commit that was applied.

        Raises:
            StoreFailed, Unavailable, DeadlineExceeded: it is not logged; the same commit may be made again.
        """
        with self._phases.timing("append"):
            if self._history is None:
                self._commit_logged(commit)
            else:
                self._log_again(commit)

    def _log_again(self, commit: Commit) -> bool:
        """Logs a commit that was applied, and could not be logged before; whether there was such a one."""
        if self._unlogged is None:
            return False
        earlier, images = self._unlogged
        if commit is not earlier:
            self._drop_unlogged()
            return False
        assert self._history is not None
        try:
            self._history.append(images(), commit.version)
        except (StoreBroken, TakenOver) as error:
            self._failure, self._unlogged = error, None
            raise
        except Exception as error:
            self._not_logged = error
            raise
        self._unlogged = None
        self._commit_logged(commit)
        self._begin_base(self._history, commit.ends_replay_epoch)
        return True

    def _log_behind(self, commit: Commit, lock: ExitStack) -> Future[None]:
        """Logs the commit that was applied, on another thread, which then closes `lock`. Done once it has."""

        def log() -> None:
            with lock:
                self._log_noted(commit)

        if self._appender is None:
            self._appender = ThreadPoolExecutor(1, "elastable-append")
        try:
            return self._appender.submit(carried(log))
        except RuntimeError:  # the store is being closed, and that thread has ended
            log()
            return at_once(None)

    def _show_ahead(self, version: int) -> bool:
        """Shows the rows of a version that is about to be logged; False: nobody can see them. The lock is held."""
        return False

    def _commit_logged(self, commit: Commit) -> None:
        self._version, self._record = commit.version, commit.record
        self._changes += 1

    def _drop_unlogged(self) -> None:
        """Takes a commit back that was applied and could not be logged."""
        if self._history is not None and self._unlogged is not None:
            self._history.log.refresh()  # where it was logged after all, it is not any more
            self._replay_anew(
                self._history, f"version {self._unlogged[0].version} could not be logged and was taken back"
            )

    def _begin_base(self, history: ChangeLog, ends_replay_epoch: bool) -> None:
        # A base brings the rows of `lazy=False` tables up to date, which changes no bit only where a replay epoch ends.
        if history.wants_base and (ends_replay_epoch or all(table.replay is None for table in self._tables.values())):
            lease = self._pins.take(self._version, None, _BASE_LEASE_S)
            self._base_of = lease, self._changes
            history.begin_base(self._pin_of(lease), [table.spec for table in self._tables.values()], self._record)

    def _base_differs(self) -> bool:
        """Whether a base is being written of the current version, whose rows were changed by hand since.

        Whoever pins the version now would read the rows of the base.
        """
        if self._base_of is None:
            return False
        lease, before = self._base_of
        return lease.gone is None and lease.version == self._version and before != self._changes

    def _abandon_base(self) -> None:
        """Before the lock is taken: whoever writes a base needs it to release its pin."""
        if self._history is not None:
            self._history.abandon_base()

    def _replay_anew(self, history: ChangeLog, why: str) -> None:
        """`why`: for the holders of pins, whose before-images go."""
        self._pins.give_up_all(why)
        for name, table in self._tables.items():
            self._gone[name] = table.written_once_gone
            table.rows.close()
        self._tables.clear()
        self._unlogged = None
        self._replay(history)
        for name, table in self._tables.items():  # its statistics have begun anew, and its rows may be others
            table.follow_gone(self._gone.pop(name, 0))
        self._changes += 1

    def _replay(self, history: ChangeLog) -> None:
        replayed = ReplayedTables(self._tables, self._new_table)
        try:
            history.replay(replayed)
        except Exception as error:
            self._failure = error
            raise
        self._version, self._record = replayed.version, replayed.record

    # The tier

    def keep_tier(
        self,
        tier: StoreTier,
        *,
        log_bytes: int = DEFAULT_LOG_BYTES,
        every_s: float = DEFAULT_EVERY_S,
        timeout_s: float = 60.0,
        closing_s: float = _CLOSING_S,
    ) -> None:
        """Brings the empty store to the last version of a tier and its log, and keeps them up to date.

        The store closes them.

        Args:
            tier: The tier, and its log.
            log_bytes: Of changes that are not in the tier; beyond it, commits wait.
            every_s: Seconds between two times that changed rows are written.
            timeout_s: Seconds that a commit waits for the tier.
            closing_s: Seconds for which `close` tries again where the tier is away.

        Raises:
            BadInput: the store is not empty.
            StoreBroken: tier or log are corrupt, or one has lost what the other needs.
        """
        self._tier, self._closing_s = tier, closing_s
        self.keep_history(tier)
        self._flusher = Flusher(
            tier,
            self._lock,
            lambda: tier.describe(self._version, self._record),
            self._may_flush,
            every_s=every_s,
            log_bytes=log_bytes,
            timeout_s=timeout_s,
        )

    def flush_status(self) -> FlushStatus | None:
        if self._flusher is None:
            return None
        with self._lock.reading():
            return self._flusher.status(self._version)

    def measures(self) -> StoreMeasures:
        wanted, read = ({}, {}) if self._tier is None else self._tier.row_counts()
        return StoreMeasures(self._phases.histograms(), wanted, read)

    def flush(self, timeout_s: float = 600.0) -> None:
        """Returns once everything that was committed before is in the tier, and as durable as that makes it.

        Where there is anything to write, this process is the one that writes to the store from then on.

        Raises:
            ElastableError: it cannot be written; nothing is lost while the store is open.
            DeadlineExceeded: not within `timeout_s` seconds.
        """
        flusher, tier = self._flusher, self._tier
        if flusher is None or tier is None:
            return
        with self._lock.writing():
            self._require_open()
            if tier.behind:
                self._own()
            if not tier.owned:
                return
        flusher.flush(timeout_s)

    def other_writer(self) -> str | None:
        return None if self._tier is None else self._tier.tier.other_writer()

    def require_owner(self) -> None:
        if self._tier is not None:
            self._tier.tier.require_owner()

    def _own(self) -> None:
        """Before a change, the store being held alone: nobody else writes from now on."""
        tier = self._tier
        if tier is not None and tier.own():
            self._replay_anew(tier, why := "another process has changed the store")
            tier.end_following(why)

    def _make_way(self) -> None:
        """Before a change, the store not being held: waits until the log may grow."""
        if self._flusher is not None and self._tier is not None:
            if not self._tier.owned:  # nothing is written until then, and the log may be full
                with self._lock.writing():
                    self._require_open()
                    self._own()
            self._flusher.wait_for_room()

    def _decide(self) -> None:
        """Before another version is staged, the store being held alone: the current one is not taken back any more."""
        if self._undecided:
            self._undecided = False
            if self._flusher is not None and self._tier is not None and self._flusher.wanted:
                self._tier.flush_alone(self._version, self._record)

    def _may_flush(self) -> bool:
        # Rows of a commit that could not be logged must not get to the tier: the store may come back without it. And
        # a process that has changed nothing leaves writing to the one that does: it would take the store from it.
        owned = self._tier is not None and self._tier.owned
        decided = not self._undecided and self._unlogged is None
        return owned and decided and self._failure is None and not self._closed

    # The end

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Frees the memory; afterwards every table is unknown."""
        if self._appender is not None:
            self._appender.shutdown()  # waits for what is being logged
        try:
            self._flush_last()
        finally:
            if self._history is not None:
                self._history.close()
        with self._lock.writing():
            self._closed = True
            self._pins.close()
            self._tables.clear()
            self._changes += 1
        self._pool.close()

    def _flush_last(self) -> None:
        """Before the store is closed. Raises `ElastableError` where what is not in a log cannot be written."""
        flusher, tier = self._flusher, self._tier
        if flusher is None or tier is None or self._closed:
            return
        flusher.stop()

        def flush_what_is_decided() -> None:
            with self._lock.writing():
                undecided = self._undecided and tier.log.keeps_entries
                if self._failure is None and self._unlogged is None and tier.owned and not undecided:
                    tier.flush_alone(self._version, self._record)

        def away(error: Exception) -> bool:  # one that does not answer has been waited for already
            return isinstance(error, Unavailable) and not isinstance(error, DeadlineExceeded)

        Retry(self._closing_s, away).call(flush_what_is_decided)
