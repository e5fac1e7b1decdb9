"""The store servers of a job as one store: pushes split over them, and versions that all of them make together."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from elastable.embedding_store.composite.composite_store import CompositeSnapshot
from elastable.embedding_store.composite.partitioned_store import PartitionedStore
from elastable.embedding_store.composite.partitions import Partition
from elastable.embedding_store.composite.store_group import RECORD_STORE, StoreGroup
from elastable.embedding_store.errors import ElastableError, ShardLost, StoreFailed, VersionError
from elastable.embedding_store.log.framing import crc32_of
from elastable.embedding_store.measures import StoreMeasures
from elastable.embedding_store.shards.ownership import refuse_moved
from elastable.embedding_store.shards.server_contract import (
    FEW_VERSIONS,
    ChangedTable,
    Committed,
    Measured,
    PushedCommit,
    RowOffer,
    RowPush,
    RowPushOutcome,
    RowSave,
    RowSums,
    SavedRows,
    SavedTable,
    ServedRows,
    ServerStatus,
    ShardServer,
    ShardStatus,
    ShardStore,
    Slices,
    TakenChanges,
    cut_of,
)
from elastable.embedding_store.tables.checks import require_gradients, require_ids

Answer = TypeVar("Answer")

_SUMMED = ("rows", "bytes", "wanted_rows", "read_rows", "log_bytes", "pushed_bytes")


class _SavedByServers(ServedRows):
    """Rows that every server saves, of what it holds itself."""

    group: StoreGroup[Any]

    def saves(self, table: str) -> bool:
        return self.group.partition(table).whole_rows

    def save_rows(self, save: RowSave) -> SavedRows:
        """All servers have ended when this returns or raises."""
        holders = {of.table: self.group.partition(of.table).holders for of in save.tables}
        calls: dict[int, Callable[[], SavedRows]] = {}
        for number, source in enumerate(self.group.sources):
            if not isinstance(source, ServedRows):
                raise StoreFailed(f"{self.group.splits.stores[number]} is no store server")
            tables = tuple(
                replace(of, prefix=f"{of.prefix}-s{number:03d}") for of in save.tables if number in holders[of.table]
            )
            probe = f"{save.probe}-s{number:03d}" if save.probe else ""
            calls[number] = partial(source.save_rows, replace(save, tables=tables, probe=probe))
        return _joined(self.group.run(calls))


class ServersSnapshot(CompositeSnapshot, _SavedByServers):
    """One version, pinned on every server; see `CompositeSnapshot`."""


class StoreServers(PartitionedStore, _SavedByServers, ShardStore):
    """Store servers as one store, each of which holds every n-th id of every table, or some columns of all of its rows.

    A version counts once all of them have logged it, and so no process decides alone: whoever looks after a crash sees
    that all have it, or takes it back where it is (`recover`). The first one keeps its record.

    Attributes:
        watch: What the servers said last, and which of them a version waits for.

    Args:
        servers: In the order in which existing tables were split; closed with this store.
        timeout_s: As of `CompositeStore`.
        strategy, strategies: As of `PartitionedStore`, of tables that are created here.

    Raises:
        BadInput: there are none, or one is given twice.
        Unavailable, StoreFailed: as the servers.
    """

    snapshot = ServersSnapshot

    def __init__(
        self,
        servers: Sequence[ShardServer],
        timeout_s: float = 60.0,
        strategy: str = "token",
        strategies: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(servers, strategy, strategies=strategies, timeout_s=timeout_s, sums_apart=True)
        self._servers = tuple(servers)  # those of `group`
        for number, server in enumerate(self._servers):
            server.take_position(number, len(self._servers))
        self._decided: PushedCommit | None = None  # the last commit, with what goes of shared budgets of rows
        self.watch = ServerWatch(servers)

    @property
    def address(self) -> str:
        return ",".join(self.addresses())

    def addresses(self) -> list[str]:
        """Where each server was last found, by its number."""
        return [server.address for server in self._servers]

    def follow(self, find: Callable[[int], str | None]) -> None:
        """From now on servers that are not reached are looked for elsewhere; see `ShardServer.follow`.

        Args:
            find: Gives the address of a server by its number.
        """
        for number, server in enumerate(self._servers):
            server.follow(partial(find, number))

    def refuse_moved(self) -> None:
        """Raises `BadInput` where rows of a server have moved elsewhere, or are on their way here."""
        for number, record in self._ask(lambda server: server.record()).items():
            refuse_moved(self._servers[number].address, record)

    def begin_job(self, job: str, may_overflow: bool, session_key: bytes) -> None:
        self._ask(lambda server: server.begin_job(job, may_overflow, session_key))

    def show_session(self, session: bytes) -> None:
        for server in self._servers:
            server.show_session(session)

    def push_rows(self, push: RowPush) -> RowPushOutcome:
        """Pushes to every server its share, to all at once.

        Returns:
            STALE where one of them says so, else DUPLICATE where all of them do.
        """
        shares = self._shares(push)
        calls = {n: partial(self._servers[n].push_rows, share) for n, share in enumerate(shares)}
        outcomes = set(self.group.run(calls).values())
        if RowPushOutcome.STALE in outcomes:
            return RowPushOutcome.STALE
        return RowPushOutcome.ACCEPTED if RowPushOutcome.ACCEPTED in outcomes else RowPushOutcome.DUPLICATE

    def shard_status(self) -> ShardStatus:
        """Of all servers together; its version is the lowest."""
        found = self._ask(lambda server: server.shard_status()).values()
        totals = {name: sum(getattr(of_server, name) for of_server in found) for name in _SUMMED}
        failure = next((of_server.failure for of_server in found if of_server.failure), "")
        lag = max(of_server.flush_lag for of_server in found)
        stores = ", ".join(dict.fromkeys(of_server.store for of_server in found if of_server.store))
        version = min(of_server.version for of_server in found)
        commits = StoreMeasures.of_all([StoreMeasures(of_server.commits) for of_server in found]).commits
        return ShardStatus(version, flush_lag=lag, failure=failure, store=stores, commits=commits, **totals)

    def measure(self, sums: RowSums) -> Measured:
        return _measured_together(list(self._await(lambda server: partial(server.measure, sums)).values()))

    def commit_pushed(self, commit: PushedCommit) -> Committed:
        """Makes a version on all servers at once.

        Where one of them lacks pushes, as it was started again meanwhile, those that have the version take it back.
        """
        with self.group.alone():
            try:
                commit = self._with_cuts(commit)
            except _PushesMissing as error:
                return Committed(error.numbers)
            return self._commit_decided(commit)

    def _commit_decided(self, commit: PushedCommit) -> Committed:
        with self.group.lock.writing():
            self.group.apart = f"the commit of version {commit.version} broke off; repeat it"
            first, others = self._servers[RECORD_STORE], replace(commit, record=stand_in(commit.record))
            made = self._await(lambda server: partial(server.commit_pushed, commit if server is first else others))
            missing = _union(of_server.missing for of_server in made.values())
            if missing:
                self._take_back(commit.version - 1, [n for n, of_server in made.items() if not of_server.missing])
            self.group.now_at(commit.version - 1 if missing else commit.version)
        tables = sorted({table for of_server in made.values() for table in of_server.tables})
        return Committed(missing, tuple(tables), all(of_server.repeated for of_server in made.values()))

    def take_changes(self, mark: bytes, base: bytes) -> TakenChanges:
        with self.group.alone():
            taken = self._ask(lambda server: server.take_changes(mark, base))
        versions = {of_server.version for of_server in taken.values()}
        if len(versions) > 1:
            raise StoreFailed(f"the store servers are at different versions: {', '.join(map(str, sorted(versions)))}")
        tables: dict[str, ChangedTable] = {}
        for of_server in taken.values():
            for table, of in of_server.tables.items():
                tables[table] = _both(tables.get(table, ChangedTable(0, 0)), of)
        return TakenChanges(versions.pop(), tables)

    def _with_cuts(self, commit: PushedCommit) -> PushedCommit:
        """The commit, and what goes for every `max_rows`, which is decided once: some servers may have it already."""
        due = self._due(commit)
        if not due:
            return commit
        if self._decided is None or replace(self._decided, cuts={}) != commit:
            offers = self._offers(commit, FEW_VERSIONS)
            cuts = {
                name: cut_of(most, [of[name] for of in offers], partial(self._offers_of, commit, name))
                for name, most in due.items()
            }
            self._decided = replace(commit, cuts=cuts)
        return self._decided

    def _due(self, commit: PushedCommit) -> dict[str, int]:
        """The `max_rows` of every table that has one, and of which rows may go now."""
        return {
            name: rule.max_rows
            for name, table in self.group.tables.items()
            if (rule := table.spec.eviction) is not None and rule.max_rows is not None
            if len(self._servers) > 1 and commit.version % rule.every == 0 and name not in commit.sums.frozen
            if table.whole_rows  # else each server has all ids, and decides as all others do
        }

    def _offers(
        self, commit: PushedCommit, most: int, ids: Mapping[str, tuple[int, int]] = {}
    ) -> list[Mapping[str, RowOffer]]:
        found = self._ask(lambda server: server.offer_rows(commit, most, ids))
        if missing := _union(offers.missing for offers in found.values()):
            raise _PushesMissing(missing)
        for n, offers in found.items():
            if lacking := sorted(set(self._due(commit)).difference(offers.tables)):
                raise StoreFailed(
                    f"{self.group.splits.stores[n]} does not say what rows it has of table {lacking[0]!r}"
                )
        return [found[n].tables for n in range(len(self._servers))]

    def _offers_of(self, commit: PushedCommit, table: str, most: int, ids: tuple[int, int] | None) -> list[RowOffer]:
        return [offers[table] for offers in self._offers(commit, most, {} if ids is None else {table: ids})]

    def _take_back(self, version: int, ahead: Sequence[int]) -> None:
        try:
            self.group.each(lambda server: server.recover(version), ahead)
        except VersionError as error:
            raise ShardLost(
                f"a store server has lost pushes of version {version}, and another one cannot go back to it, as it "
                f"keeps no log: {error}"
            ) from error

    def _ask(self, call: Callable[[ShardServer], Answer]) -> dict[int, Answer]:
        return self.group.run({n: partial(call, server) for n, server in enumerate(self._servers)})

    def _await(self, call: Callable[[ShardServer], Callable[[], Answer]]) -> dict[int, Answer]:
        """Makes a call to each server at once, of which the watch knows that a version waits for it."""
        return self.group.run({n: self.watch.timed(n, call(server)) for n, server in enumerate(self._servers)})

    def _shares(self, push: RowPush) -> list[RowPush]:
        """What each server gets; all of them get something, as a sum names every push."""
        parts: list[list[dict[str, Slices]]] = [[{} for _ in push.parts] for _ in self._servers]
        for number, part in enumerate(push.parts):
            for table, slices in part.items():
                found = self.group.partition(table)
                for shard, share in _split(found, slices).items():
                    parts[shard][number][table] = share
        return [replace(push, parts=tuple(of_server)) for of_server in parts]


def stand_in(record: bytes | None) -> bytes | None:
    """What servers but the first keep as the record of a version: its checksum.

    By it a follower tells what all servers have of one commit from what was taken back and made anew.
    """
    return None if record is None else b"%08x %d" % (crc32_of(record), len(record))


class _PushesMissing(Exception):
    def __init__(self, numbers: tuple[int, ...]) -> None:
        super().__init__(f"pushes {list(numbers)} are missing")
        self.numbers = numbers


def _split(table: Partition, slices: Slices) -> Mapping[int, Slices]:
    ids = require_ids(table.spec, slices.indices)
    values = require_gradients(table.spec, len(ids), slices.values)
    return {part.shard: Slices(part.ids, table.cut(part, values)) for part in table.parts(ids)}


def _both(one: ChangedTable, other: ChangedTable) -> ChangedTable:
    known = one.changed is not None and other.changed is not None
    changed = (one.changed or 0) + (other.changed or 0) if known else None
    return ChangedTable(one.rows + other.rows, changed, one.shrunk or other.shrunk)


def _measured_together(every: Sequence[Measured]) -> Measured:
    if missing := _union(measured.missing for measured in every):
        return Measured(missing=missing)
    broken = {table for measured in every for table in measured.not_finite}
    squares: dict[str, int] = {}
    for measured in every:
        for table, square in measured.squares.items():
            if table not in broken:
                squares[table] = squares.get(table, 0) + square
    return Measured(squares, tuple(sorted(broken)))


def _union(every: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """All of them, each once, in order."""
    return tuple(sorted({number for numbers in every for number in numbers}))


def _joined(every: Mapping[int, SavedRows]) -> SavedRows:
    tables: dict[str, SavedTable] = {}
    for saved in every.values():
        for table, of in saved.tables.items():
            before = tables.get(table, SavedTable(0, 0, ()))
            tables[table] = SavedTable(
                before.rows + of.rows, before.written + of.written, before.files + of.files, before.live + of.live
            )
    return SavedRows(tables, {name: file for saved in every.values() for name, file in saved.files.items()})


class ServerWatch:
    """What store servers said last, and which of them a version waits for. Safe to use from many threads.

    Args:
        servers: In order.
        now: Monotonic clock, in seconds.
    """

    def __init__(self, servers: Sequence[ShardStore], now: Callable[[], float] = time.monotonic) -> None:
        self._servers, self._now = tuple(servers), now
        self._seen = tuple(ServerStatus(each.address) for each in servers)
        self._looking = threading.Lock()
        self._waiting: dict[int, float] = {}  # server -> since when a call that makes a version waits for it

    def timed(self, server: int, call: Callable[[], Answer]) -> Callable[[], Answer]:
        """The call; while it is under way the job waits for that server."""

        def waiting() -> Answer:
            self._waiting[server] = self._now()
            try:
                return call()
            finally:
                self._waiting.pop(server, None)

        return waiting

    def look(self) -> None:
        """Asks all servers at once; one that does not answer keeps what it said before, with the reason."""
        # Separate threads: those of the store may all be waiting for a server that is away.
        with self._looking, ThreadPoolExecutor(len(self._servers), "elastable-server-watch") as threads:
            self._seen = tuple(threads.map(self._asked, self._servers, self._seen))

    def statuses(self) -> tuple[ServerStatus, ...]:
        """What the servers said at the last look, and how long each has been waited for by now."""
        now, waiting = self._now(), dict(self._waiting)
        return tuple(
            replace(seen, waited_s=max(0.0, now - waiting[number])) if number in waiting else seen
            for number, seen in enumerate(self._seen)
        )

    @staticmethod
    def _asked(server: ShardStore, before: ServerStatus) -> ServerStatus:
        try:
            return replace(before, address=server.address, shard=server.shard_status(), failure="")
        except ElastableError as error:
            return replace(before, address=server.address, failure=f"{type(error).__name__}: {error}")
