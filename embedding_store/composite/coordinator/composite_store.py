"""Several stores as one, at one version."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from elastable.embedding_store.composite.coordinator.commit_coordinator import (
    RECORD_STORE,
    CommitCoordinator,
    recovery_version,
)
from elastable.embedding_store.composite.coordinator.composite_reads import CompositeReads, total_rows, total_statistics
from elastable.embedding_store.composite.coordinator.composite_snapshot import CompositeSnapshot
from elastable.embedding_store.composite.splits.partition import Part, Partition
from elastable.embedding_store.composite.splits.table_splits import TableSplits
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import Commit, FlushStatus, RowBlock, TableState, TableStatistics
from elastable.embedding_store.contract.snapshot import (
    PinStatistics,
    Snapshot,
    joined_pins,
    refuse_while_pinned,
    require_lease,
)
from elastable.embedding_store.contract.spec import TableSpec, refuse_conflict
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import (
    DeadlineExceeded,
    ElastableError,
    ShardLost,
    SpecConflict,
    TableNotFound,
    VersionError,
)
from elastable.embedding_store.measures.values import StoreMeasures
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.rows.checks import require_block, require_ids, require_version
from elastable.embedding_store.tables import BaseStore

__all__ = ["CompositeStore"]


class CompositeStore(CompositeReads[EmbeddingStore], BaseStore):
    """Several stores of any kind as one. All of them have the same version.

    A lookup reads one version of all stores if commits and lookups go through this object; lookups from elsewhere name
    the version they want.

    A commit goes to every store, also to those that hold none of its tables. It is staged on all of them before
    anything changes on one. If a store fails after that, `commit` raises `StoreFailed`. Lookups without a version and
    every other commit are then refused until the same commit is repeated (stores that have it are skipped), `recover`
    takes it back, or rows are restored and `reset_version` is called.

    A store that comes back without its rows is `ShardLost`: it lacks tables, or is at an earlier version than all
    stores have been seen to hold.

    Args:
        stores: Closed with this one.
        splits: Which of them holds which part of a table, in the same order.
        timeout_s: Seconds that a lookup waits for a commit, or a commit for lookups and other commits, before
            `DeadlineExceeded`.
        repairs_unknown: Whether a commit may complete one that another process began, which nobody can compare with it;
            else `recover` comes first.

    Raises:
        BadInput: there are no stores, or one is given twice.
    """

    def __init__(
        self, stores: Sequence[EmbeddingStore], splits: TableSplits, timeout_s: float, repairs_unknown: bool = False
    ) -> None:
        super().__init__(stores, splits, timeout_s)
        self._changing = threading.Lock()
        self._timeout_s = timeout_s
        self._commits = CommitCoordinator(self._sources, self._calls, self._in_memory, repairs_unknown)
        self._reached = 0  # the version that every store has been seen to hold
        versions = self._versions().values()
        if min(versions) < max(versions):
            self._apart = "a commit broke off; repeat it, or recover the store"
        self._reached = min(versions)

    def create_table(self, spec: TableSpec) -> bool:
        """Makes the table, or completes one that some stores lack. Raises `BadSpec`, or `Unsupported`."""
        with self._alone():
            self._reload()
            known = self._partitions.get(spec.name)
            if known is not None:
                refuse_conflict(known.spec, spec)
                return False
            table = self._splits.plan(spec)
            self._refuse_leftovers(table)
            calls = {
                number: partial(self._sources[number].create_table, part)
                for number, part in enumerate(table.shards)
                if part is not None
            }
            created, errors = self._calls.outcomes(calls)
            if errors:
                # A store refused its part: what is new on the others is dropped again.
                drops = {n: partial(self._sources[n].drop_table, spec.name) for n, new in created.items() if new}
                self._calls.outcomes(drops)
                self._calls.raise_first(errors)
            self._reload()
            return True

    def drop_table(self, table: str) -> None:
        """Drops the table, also what an interrupted drop has left of it."""
        with self._alone(), self._lock.writing():
            holders = [number for number, spec in enumerate(self._held().get(table, ())) if spec is not None]
            if not holders:
                raise TableNotFound(f"no table {table!r}; tables here: {', '.join(sorted(self._partitions)) or 'none'}")
            self._refuse_while_pinned(f"table {table!r} cannot be dropped")
            self._partitions.pop(table, None)
            self._each(lambda store: store.drop_table(table), holders)

    def commit(self, commit: Commit) -> None:
        with self._alone():
            finish = self._staged(commit)
            with self._lock.writing():
                finish()

    def stage(self, commit: Commit) -> Callable[[], None]:
        with self._alone():
            finish_all = self._staged(commit)

        def finish() -> None:
            with self._alone(), self._lock.writing():
                finish_all()

        return finish

    @property
    def keeps_records(self) -> bool:
        return all(self._each(lambda store: store.keeps_records, together=False).values())

    def record(self) -> bytes | None:
        with self._lock.reading():
            self._require_one_version()
            return self._each(lambda store: store.record(), (RECORD_STORE,))[RECORD_STORE]

    def other_writer(self) -> str | None:
        writers = self._each(lambda store: store.other_writer(), together=not self._in_memory)
        return next(filter(None, writers.values()), None)

    def require_owner(self) -> None:
        self._each(lambda store: store.require_owner(), together=not self._in_memory)

    def recover(self, version: int | None = None) -> int:
        """Takes back what some stores did of a commit; None: to the version that all of them have reached.

        Returns:
            Rows taken back on all stores; with the encoding partition each part of a row counts.
        """
        with self._alone(), self._lock.writing():
            target = recovery_version(self._versions(), version, self._splits.stores)
            self._apart = "a commit is being taken back; do that again"
            taken = self._each(lambda store: store.recover(target))
            self._one_version(target)
        return sum(taken.values())

    def reset_version(self, version: int, record: bytes | None = None) -> None:
        require_version(version)
        with self._alone(), self._lock.writing():
            self._refuse_while_pinned(f"the version cannot be reset to {version}")
            self._apart = f"not every store has been reset to version {version}"
            self._reached = 0
            first = self._sources[RECORD_STORE]
            self._each(lambda store: store.reset_version(version, record if store is first else None))
            self._one_version(version)

    def pin(self, version: int | None = None, lease_s: float = 60.0) -> Snapshot:
        """Pins a version on every store, or on none."""
        require_lease(lease_s)
        with self._alone():
            wanted = self._require_one_version() if version is None else version
            calls = {number: partial(store.pin, wanted, lease_s) for number, store in enumerate(self._sources)}
            pins, errors = self._calls.outcomes(calls)
            if errors:
                self._calls.outcomes({number: pin.close for number, pin in pins.items()})
                self._calls.raise_first(errors)
        return self._snapshot_of([*map(pins.__getitem__, calls)], wanted)

    def _snapshot_of(self, pins: Sequence[Snapshot], version: int) -> CompositeSnapshot:
        return CompositeSnapshot(pins, self._splits, version, self._timeout_s)

    def pins(self) -> tuple[PinStatistics, ...]:
        return joined_pins(list(self._each(lambda store: store.pins()).values()))

    def flush_status(self) -> FlushStatus | None:
        return FlushStatus.of_all([*self._each(lambda store: store.flush_status(), together=False).values()])

    def measures(self) -> StoreMeasures:
        return StoreMeasures.of_all([*self._each(lambda store: store.measures(), together=False).values()])

    def put(self, table: str, blocks: Iterable[RowBlock]) -> None:
        """Writes one block after the other, each to all stores at once."""
        found = self._partition(table)
        slot_width = row_optimizer(found.spec.optimizer).slot_width(found.spec.dim)
        for given in blocks:
            block = require_block(found.spec, slot_width, given)

            def put(part: Part, block: RowBlock = block) -> None:
                self._sources[part.shard].put(table, [found.block(part, block)])

            with self._alone(), self._lock.writing():
                self._calls.run({part.shard: partial(put, part) for part in found.parts(block.ids)})

    def delete(self, table: str, ids: Int64) -> int:
        """Deletes rows; repeat it if a store failed."""
        with self._alone(), self._lock.writing():
            found = self._partition(table)
            parts = found.parts(require_ids(found.spec, ids))
            calls = {part.shard: partial(self._sources[part.shard].delete, table, part.ids) for part in parts}
            return total_rows(found, self._calls.run(calls))

    def table_statistics(self, table: str) -> TableStatistics:
        found = self._partition(table)
        with self._lock.reading():
            parts = self._each(lambda store: store.table_statistics(table), found.holders)
        return total_statistics(found, parts)

    def put_table_state(self, table: str, state: TableState) -> None:
        with self._alone(), self._lock.writing():
            self._each(lambda store: store.put_table_state(table, state), self._partition(table).holders)

    def clear(self, table: str) -> None:
        with self._alone(), self._lock.writing():
            self._refuse_while_pinned(f"table {table!r} cannot be cleared")
            self._each(lambda store: store.clear(table), self._partition(table).holders)

    def _refuse_while_pinned(self, what: str) -> None:
        """Asks every store before anything is changed on one."""
        pins = self._each(lambda store: store.pins())
        refuse_while_pinned(what, [pin.version for of_store in pins.values() for pin in of_store])

    def _staged(self, commit: Commit) -> Callable[[], None]:
        tables = [self._partition(name) for name in commit.updates]
        finish_all = self._commits.stage(commit, tables, self._versions())

        def finish() -> None:
            self._apart = f"the commit of version {commit.version} broke off; repeat it"
            finish_all()
            self._one_version(commit.version)

        return finish

    def _one_version(self, version: int) -> None:
        self._apart, self._reached = None, version
        self._commits.forget()

    def _versions(self) -> dict[int, int]:
        reached = self._reached  # before they are asked: a commit may come between
        versions = super()._versions()
        for store, version in sorted(versions.items()):
            if version < reached:
                raise ShardLost(f"{self._splits.stores[store]} is lost: {_fell_back(version, reached)}")
        return versions

    def _why_lost(self, store: int, error: ElastableError) -> str:
        """A store that lost its rows may answer that it never had a version or a table."""
        if isinstance(error, VersionError | TableNotFound):
            found, _ = self._calls.outcomes({store: self._sources[store].version})
            if found.get(store, reached := self._reached) < reached:
                return _fell_back(found[store], reached)
        return super()._why_lost(store, error)

    def _refuse_leftovers(self, table: Partition) -> None:
        """Refuses to complete a table that was begun with another spec, or of which some stores hold rows.

        Raises:
            SpecConflict: an interrupted `create_table` had another spec, or split the table otherwise.
            ShardLost: some stores hold rows of the table that others lack.
        """
        name = table.spec.name
        there = {number: spec for number, spec in enumerate(self._held().get(name, ())) if spec is not None}
        for number, spec in there.items():
            if spec != table.shards[number]:
                refuse_conflict(spec.origin.table or spec, table.spec)
                raise SpecConflict(f"table {name!r} was begun with another strategy; drop it first")
        counts = self._each(lambda store: store.row_count(name), there)
        if any(counts.values()):
            lacking = ", ".join(self._splits.stores[number] for number in table.holders if number not in there)
            raise ShardLost(
                f"{lacking} is lost: it lacks table {name!r}, of which others hold {sum(counts.values())} rows; drop "
                "the table, or begin with --overwrite"
            )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Around a change: one at a time."""
        if not self._changing.acquire(timeout=self._timeout_s):
            raise DeadlineExceeded(f"another change of the stores has not ended within {self._timeout_s:g} s")
        try:
            self._require_open()
            yield
        finally:
            self._changing.release()


def _fell_back(version: int, reached: int) -> str:
    return f"it is at version {version}, and was at {reached}: it was started again without its rows"
