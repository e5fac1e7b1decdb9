"""The store servers of a job as one store: pushes split over them, and versions that all of them make together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from elastable.embedding_store.composite.coordinator.commit_coordinator import RECORD_STORE
from elastable.embedding_store.composite.coordinator.composite_snapshot import CompositeSnapshot
from elastable.embedding_store.composite.partitions.partitioned_store import PartitionedStore
from elastable.embedding_store.composite.partitions.rows_on_servers import RowsOnServers, ServersSnapshot
from elastable.embedding_store.composite.partitions.server_watch import ServerWatch
from elastable.embedding_store.composite.partitions.sums_on_servers import SumsOnServers, union_of
from elastable.embedding_store.composite.splits.partition import Partition
from elastable.embedding_store.composite.splits.token_split import gather_rows
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, ShardLost, StoreFailed, VersionError
from elastable.embedding_store.measures.values import StoreMeasures
from elastable.embedding_store.rows.checks import require_gradients, require_ids
from elastable.embedding_store.shards.ownership import refuse_moved
from elastable.embedding_store.shards.row_pushes import (
    FEW_VERSIONS,
    Committed,
    PushedCommit,
    RowOffer,
    RowPush,
    RowPushOutcome,
    Slices,
    cut_of,
)
from elastable.embedding_store.shards.shard_store import ChangedTable, ShardServer, ShardStatus, TakenChanges

__all__ = ["ShardedStore"]

_SUMMED = ("rows", "bytes", "wanted_rows", "read_rows", "log_bytes", "pushed_bytes")


class ShardedStore(RowsOnServers[EmbeddingStore], SumsOnServers, PartitionedStore):
    """Store servers as one store, each of which holds every n-th id of every table.

    A version counts once all of them have logged it, and so no process decides alone: whoever looks after a crash sees
    that all have it, or takes it back where it is (`recover`). Its record lies with the first one.

    Attributes:
        watch: What the servers said last, and which of them a version waits for.

    Args:
        servers: In the order in which existing tables were split; closed with this store.
        timeout_s: As of `CompositeStore`.

    Raises:
        BadInput: there are none, or one is given twice.
        Unavailable, StoreFailed: as the servers.
    """

    def __init__(self, servers: Sequence[ShardServer], timeout_s: float = 60.0) -> None:
        super().__init__(servers, "token", timeout_s=timeout_s, shares_budgets=True)
        self._servers = tuple(servers)
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
        for number, record in self._calls.run({n: server.record for n, server in enumerate(self._servers)}).items():
            refuse_moved(self._servers[number].address, record)

    def begin_job(self, job: str, may_overflow: bool) -> None:
        self._calls.run({n: partial(server.begin_job, job, may_overflow) for n, server in enumerate(self._servers)})

    def push_rows(self, push: RowPush) -> RowPushOutcome:
        """Pushes to every server its share, to all at once.

        Returns:
            STALE where one of them says so, else DUPLICATE where all of them do.
        """
        shares = self._shares(push)
        outcomes = set(
            self._calls.run({n: partial(self._servers[n].push_rows, share) for n, share in enumerate(shares)}).values()
        )
        if RowPushOutcome.STALE in outcomes:
            return RowPushOutcome.STALE
        return RowPushOutcome.ACCEPTED if RowPushOutcome.ACCEPTED in outcomes else RowPushOutcome.DUPLICATE

    def shard_status(self) -> ShardStatus:
        """Of all servers together; its version is the lowest."""
        found = self._calls.run({n: server.shard_status for n, server in enumerate(self._servers)}).values()
        totals = {name: sum(getattr(of_server, name) for of_server in found) for name in _SUMMED}
        failure = next((of_server.failure for of_server in found if of_server.failure), "")
        lag = max(of_server.flush_lag for of_server in found)
        stores = ", ".join(dict.fromkeys(of_server.store for of_server in found if of_server.store))
        version = min(of_server.version for of_server in found)
        commits = StoreMeasures.of_all([StoreMeasures(of_server.commits) for of_server in found]).commits
        return ShardStatus(version, flush_lag=lag, failure=failure, store=stores, commits=commits, **totals)

    def commit_pushed(self, commit: PushedCommit) -> Committed:
        """Makes a version on all servers at once.

        Where one of them lacks pushes, as it was started again meanwhile, those that have the version take it back.
        """
        with self._alone():
            try:
                commit = self._with_cuts(commit)
            except _PushesMissing as error:
                return Committed(error.numbers)
            return self._commit_decided(commit)

    def _commit_decided(self, commit: PushedCommit) -> Committed:
        with self._lock.writing():
            self._apart = f"the commit of version {commit.version} broke off; repeat it"
            others = replace(commit, record=None)
            made = self._calls.run(
                {
                    n: self.watch.timed(n, partial(server.commit_pushed, commit if n == RECORD_STORE else others))
                    for n, server in enumerate(self._servers)
                }
            )
            missing = union_of(of_server.missing for of_server in made.values())
            if missing:
                self._take_back(commit.version - 1, [n for n, of_server in made.items() if not of_server.missing])
            self._one_version(commit.version - 1 if missing else commit.version)
        tables = sorted({table for of_server in made.values() for table in of_server.tables})
        return Committed(missing, tuple(tables), all(of_server.repeated for of_server in made.values()))

    def take_changes(self, mark: bytes, base: bytes) -> TakenChanges:
        with self._alone():
            taken = self._calls.run(
                {n: partial(server.take_changes, mark, base) for n, server in enumerate(self._servers)}
            )
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
            for name, table in self._partitions.items()
            if (rule := table.spec.eviction) is not None and rule.max_rows is not None
            if len(self._servers) > 1 and commit.version % rule.every == 0 and name not in commit.sums.frozen
        }

    def _offers(
        self, commit: PushedCommit, most: int, ids: Mapping[str, tuple[int, int]] = {}
    ) -> list[Mapping[str, RowOffer]]:
        found = self._calls.run(
            {n: partial(server.offer_rows, commit, most, ids) for n, server in enumerate(self._servers)}
        )
        if missing := union_of(offers.missing for offers in found.values()):
            raise _PushesMissing(missing)
        for n, offers in found.items():
            if lacking := sorted(set(self._due(commit)).difference(offers.tables)):
                raise StoreFailed(f"{self._calls.names[n]} does not say what rows it has of table {lacking[0]!r}")
        return [found[n].tables for n in range(len(self._servers))]

    def _offers_of(self, commit: PushedCommit, table: str, most: int, ids: tuple[int, int] | None) -> list[RowOffer]:
        return [offers[table] for offers in self._offers(commit, most, {} if ids is None else {table: ids})]

    def _take_back(self, version: int, ahead: Sequence[int]) -> None:
        try:
            self._each(lambda server: server.recover(version), ahead)
        except VersionError as error:
            raise ShardLost(
                f"a store server has lost pushes of version {version}, and another one cannot go back to it, as it "
                f"keeps no log: {error}"
            ) from error

    def _snapshot_of(self, pins: Sequence[Snapshot], version: int) -> CompositeSnapshot:
        return ServersSnapshot(pins, self._splits, version, self._timeout_s)

    def _shares(self, push: RowPush) -> list[RowPush]:
        """What each server gets; all of them get something, as a sum names every push."""
        parts: list[list[dict[str, Slices]]] = [[{} for _ in push.parts] for _ in self._servers]
        for number, part in enumerate(push.parts):
            for table, slices in part.items():
                found = self._partition(table)
                for shard, share in _split(found, slices).items():
                    parts[shard][number][table] = share
        return [replace(push, parts=tuple(of_server)) for of_server in parts]


class _PushesMissing(Exception):
    """Pushes that are to be summed are not there."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        super().__init__(f"pushes {list(numbers)} are missing")
        self.numbers = numbers


def _split(table: Partition, slices: Slices) -> Mapping[int, Slices]:
    """The gradient of each shard."""
    if len(table.shards) > 1 and not table.whole_rows:
        raise BadInput(f"table {table.spec.name!r} is split by columns; store servers split tables by ids")
    ids = require_ids(table.spec, slices.indices)
    values = require_gradients(table.spec, len(ids), slices.values)
    return {
        part.shard: Slices(part.ids, values if part.places is None else gather_rows(values, part.places))
        for part in table.parts(ids)
    }


def _both(one: ChangedTable, other: ChangedTable) -> ChangedTable:
    known = one.changed is not None and other.changed is not None
    changed = (one.changed or 0) + (other.changed or 0) if known else None
    return ChangedTable(one.rows + other.rows, changed, one.shrunk or other.shrunk)
