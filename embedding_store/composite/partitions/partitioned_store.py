"""The store whose tables are split over several stores, by id or by column."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from elastable.embedding_store.composite.partitions.partition import STRATEGIES, Part, Partition, partition
from elastable.embedding_store.composite.partitions.partitioned_commit import (
    RECORD_SHARD,
    ShardCommits,
    require_common_version,
)
from elastable.embedding_store.composite.partitions.partitioned_pin import PartitionedPin
from elastable.embedding_store.composite.partitions.partitioned_scan import scan_columns, scan_tokens
from elastable.embedding_store.composite.partitions.partitioned_source import PartitionedSource, told
from elastable.embedding_store.composite.partitions.shard_reads import count_rows, of_rows, read_rows, read_sightings
from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.contract.pins import PinStatistics, joined_pins, refuse_while_pinned, require_lease
from elastable.embedding_store.contract.refusals import refuse_conflict
from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableStatistics
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import (
    BadSpec,
    DeadlineExceeded,
    ElastableError,
    ShardLost,
    SpecConflict,
    StoreFailed,
    TableNotFound,
    VersionError,
)
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.rows.checks import require_block, require_block_rows, require_ids
from elastable.embedding_store.rows.commit_checks import require_version
from elastable.embedding_store.tables.base_store import BaseStore

__all__ = ["PartitionedStore"]


class PartitionedStore(PartitionedSource, BaseStore):
    """Embedding tables over several stores, each shard a store of any kind.

    A lookup sees one version whole, over all shards, where commits and lookups
    go through this object; lookups from elsewhere name the version they want.

    A commit is staged on every shard before anything is changed on one. Should
    a shard fail after that, `commit` raises `StoreFailed` and says on which
    shards the version stands. Lookups without a version, and every other
    commit, are then refused until the very same commit is repeated, by this
    process or another one, which leaves out the shards that have it; or until
    rows are restored and `reset_version` is called.

    A shard that comes back without its rows is `ShardLost`: it lacks tables, or
    stands at an earlier version than this store has seen on all shards.
    """

    def __init__(
        self,
        stores: Sequence[EmbeddingStore],
        strategy: str = "token",
        *,
        strategies: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """Takes the stores over: they are closed with this one.

        Args:
            stores: The shards, in the order in which existing tables were split.
            strategy: How tables that are created here are split: "token" (ids)
                or "encoding" (columns). Existing tables say so themselves.
            strategies: Table name -> strategy, for those that are split otherwise.
            timeout_s: Seconds that a lookup waits for a commit, or a commit
                for lookups and other commits, before `DeadlineExceeded`.

        Raises:
            BadSpec: no such strategy; the known ones are listed.
            BadInput: there is no store, or one stands twice.
            Unavailable, StoreFailed: as the stores.
        """
        super().__init__(stores, timeout_s)
        self._stores = tuple(stores)
        self._strategy = strategy
        self._strategies = dict(strategies or {})
        for table, name in (("", strategy), *self._strategies.items()):
            if name not in STRATEGIES:
                where = f"table {table!r}: " if table else ""
                raise BadSpec(f"{where}strategy {name!r}; known strategies are {', '.join(STRATEGIES)}")
        self._changing = threading.Lock()
        self._timeout_s = timeout_s
        self._commits = ShardCommits(self._stores, self._calls, self._in_memory)
        self._stood = 0  # the version that every shard has been seen to hold
        versions = self._versions()
        if len(set(versions.values())) > 1:
            self._apart = "a commit broke off; repeat it"
        self._stood = min(versions.values())

    def create_table(self, spec: TableSpec) -> bool:
        """As in `EmbeddingStore.create_table`; a table that some shards lack is completed.

        Raises:
            BadSpec: an unknown optimizer.
            Unsupported: the table cannot be split by its strategy.
        """
        with self._alone():
            self._reload()
            known = self._partitions.get(spec.name)
            if known is not None:
                refuse_conflict(known.spec, spec)
                return False
            table = partition(spec, self._strategies.get(spec.name, self._strategy), self.shards)
            self._refuse_another_beginning(table)
            self._refuse_remains(table)
            calls = {
                number: partial(self._stores[number].create_table, shard)
                for number, shard in enumerate(table.shards)
                if shard is not None
            }
            created, errors = self._calls.outcomes(calls)
            if errors:
                # A backend refused its part: the others' parts go, where they are new.
                drops = {n: partial(self._stores[n].drop_table, spec.name) for n, new in created.items() if new}
                self._calls.outcomes(drops)
                self._calls.raise_first(errors)
            self._reload()
            return True

    def drop_table(self, table: str) -> None:
        """As in `EmbeddingStore.drop_table`; what is left of a drop that broke off is dropped, too."""
        with self._alone(), self._lock.writing():
            held = self._held().get(table)
            if held is None:
                raise TableNotFound(f"no table {table!r}; tables here: {', '.join(sorted(self._partitions)) or 'none'}")
            self._refuse_while_pinned(f"table {table!r} cannot be dropped")
            self._partitions.pop(table, None)
            holders = [number for number, spec in enumerate(held) if spec is not None]
            self._calls.run({number: partial(self._stores[number].drop_table, table) for number in holders})

    def commit(self, commit: Commit) -> None:
        """As in `EmbeddingStore.commit`, with what the class promises.

        Raises:
            StoreFailed: also where shards are apart: repeat the commit.
        """
        with self._alone():
            finish = self._staged(commit)
            with self._lock.writing():
                finish()

    def stage(self, commit: Commit) -> Callable[[], None]:
        """As in `EmbeddingStore.stage`, on every shard."""
        with self._alone():
            finish_all = self._staged(commit)

        def finish() -> None:
            with self._alone(), self._lock.writing():
                finish_all()

        return finish

    @property
    def keeps_records(self) -> bool:
        """As in `EmbeddingStore.keeps_records`: where every shard keeps them."""
        return all(store.keeps_records for store in self._stores)

    def record(self) -> bytes | None:
        """As in `EmbeddingStore.record`.

        Raises:
            StoreFailed: shards are apart.
        """
        with self._lock.reading():
            self._look_whether_together()
            return self._stores[RECORD_SHARD].record()

    def other_writer(self) -> str | None:
        """As in `EmbeddingStore.other_writer`: the first of any store."""
        return next((writer for store in self._stores if (writer := store.other_writer())), None)

    def require_owner(self) -> None:
        """As in `EmbeddingStore.require_owner`, of every store."""
        for store in self._stores:
            store.require_owner()

    def recover(self, version: int | None = None) -> int:
        """As in `EmbeddingStore.recover`, on every shard: to the version that stands on all of them, if none is given.

        Returns:
            Rows taken back on all shards; with the encoding partition each part of a row counts.
        """
        with self._alone(), self._lock.writing():
            versions = self._versions()
            self._refuse_far_behind(versions)
            target = min(versions.values()) if version is None else version
            require_common_version(target, versions.values())
            self._apart = "a commit is being taken back; do that again"
            calls = {number: partial(store.recover, target) for number, store in enumerate(self._stores)}
            taken = sum(self._calls.run(calls).values())
            self._apart, self._stood = None, target
            self._commits.forget()
            return taken

    def reset_version(self, version: int) -> None:
        """As in `EmbeddingStore.reset_version`, on every shard; shards that were apart are together again."""
        require_version(version)
        with self._alone(), self._lock.writing():
            self._refuse_while_pinned(f"the version cannot be reset to {version}")
            self._apart = f"not every shard was told that its rows are version {version}"
            self._stood = 0
            self._on_all(lambda store: store.reset_version(version))
            self._apart, self._stood = None, version
            self._commits.forget()

    def pin(self, version: int | None = None, lease_s: float = 60.0) -> Snapshot:
        """As in `EmbeddingStore.pin`, on every shard, or on none."""
        require_lease(lease_s)
        with self._alone():
            versions = self._versions()
            if version is None and len(set(versions.values())) > 1:
                raise StoreFailed(f"{told(versions)}: repeat the commit that broke off, and pin then")
            wanted = min(versions.values()) if version is None else version
            calls = {number: partial(store.pin, wanted, lease_s) for number, store in enumerate(self._stores)}
            pins, errors = self._calls.outcomes(calls)
            if errors:
                self._calls.outcomes({number: pin.close for number, pin in pins.items()})
                self._calls.raise_first(errors)
        return PartitionedPin([pins[number] for number in range(self.shards)], wanted, self._timeout_s)

    def pins(self) -> tuple[PinStatistics, ...]:
        """As in `EmbeddingStore.pins`: those that stand on every shard."""
        told_of = self._calls.run({number: store.pins for number, store in enumerate(self._stores)})
        return joined_pins([told_of[number] for number in range(self.shards)])

    def row_count(self, table: str) -> int:
        """As in `EmbeddingStore.row_count`."""
        with self._lock.reading():  # or some shards would tell of a commit that others have yet to make
            return count_rows(self._partition(table), self._stores, self._calls)

    def scan(self, table: str, block_rows: int = 65_536) -> Iterator[RowBlock]:
        """As in `EmbeddingStore.scan`; a block is of one version, a commit between two shows in the later one."""
        found = self._partition(table)
        scan = scan_tokens if found.by_token else scan_columns
        return scan(found, self._stores, self._calls, self._lock, require_block_rows(block_rows))

    def read_rows(self, table: str, ids: Int64) -> RowBlock:
        """As in `EmbeddingStore.read_rows`."""
        with self._lock.reading():
            return read_rows(self._partition(table), self._stores, self._calls, ids)

    def put(self, table: str, blocks: Iterable[RowBlock]) -> None:
        """As in `EmbeddingStore.put`, one block after the other, each on all shards at once."""
        found = self._partition(table)
        slot_width = row_optimizer(found.spec.optimizer).slot_width(found.spec.dim)
        for given in blocks:
            block = require_block(found.spec, slot_width, given)

            def put(part: Part, block: RowBlock = block) -> None:
                self._stores[part.shard].put(table, [found.block(part, block)])

            with self._alone(), self._lock.writing():
                self._calls.run({part.shard: partial(put, part) for part in found.parts(block.ids)})

    def delete(self, table: str, ids: Int64) -> int:
        """As in `EmbeddingStore.delete`; repeat it where a shard failed."""
        with self._alone(), self._lock.writing():
            found = self._partition(table)
            parts = found.parts(require_ids(found.spec, ids))
            calls = {part.shard: partial(self._stores[part.shard].delete, table, part.ids) for part in parts}
            return of_rows(found, self._calls.run(calls))

    def table_statistics(self, table: str) -> TableStatistics:
        """As in `EmbeddingStore.table_statistics`, all shards together."""
        found = self._partition(table)
        calls = {number: partial(self._stores[number].table_statistics, table) for number in found.holders}
        with self._lock.reading():
            found_on = self._calls.run(calls)
        taken = [of.bytes for of in found_on.values()]
        return TableStatistics(
            rows=of_rows(found, {shard: of.rows for shard, of in found_on.items()}),
            bytes=None if None in taken else sum(size or 0 for size in taken),
            refused=of_rows(found, {shard: of.refused for shard, of in found_on.items()}),
            evicted=of_rows(found, {shard: of.evicted for shard, of in found_on.items()}),
            deleted=of_rows(found, {shard: of.deleted for shard, of in found_on.items()}),
            written=of_rows(found, {shard: of.written for shard, of in found_on.items()}),
        )

    def sightings(self, table: str) -> UInt8 | None:
        """As in `EmbeddingStore.sightings`: the greatest counters of all shards, which is enough for each of them."""
        with self._lock.reading():
            return read_sightings(self._partition(table), self._stores, self._calls)

    def put_sightings(self, table: str, counters: UInt8) -> None:
        """As in `EmbeddingStore.put_sightings`, on every shard."""
        with self._alone(), self._lock.writing():
            holders = self._partition(table).holders
            self._calls.run({n: partial(self._stores[n].put_sightings, table, counters) for n in holders})

    def clear(self, table: str) -> None:
        """As in `EmbeddingStore.clear`."""
        with self._alone(), self._lock.writing():
            holders = self._partition(table).holders
            self._refuse_while_pinned(f"table {table!r} cannot be cleared")
            self._calls.run({number: partial(self._stores[number].clear, table) for number in holders})

    def _refuse_while_pinned(self, what: str) -> None:
        """Looks at every shard before anything is changed on one."""
        pins = self._calls.run({number: store.pins for number, store in enumerate(self._stores)})
        refuse_while_pinned(what, [pin.version for of_shard in pins.values() for pin in of_shard])

    def _staged(self, commit: Commit) -> Callable[[], None]:
        tables = [self._partition(name) for name in commit.updates]
        finish_all = self._commits.stage(commit, tables, self._versions())

        def finish() -> None:
            self._apart = f"the commit of version {commit.version} broke off; repeat it"
            finish_all()
            self._apart, self._stood = None, commit.version

        return finish

    def _versions(self) -> dict[int, int]:
        stood = self._stood  # before they are asked: a commit may come between
        versions = super()._versions()
        for shard, version in sorted(versions.items()):
            if version < stood:
                raise ShardLost(f"shard {shard} of {self.shards} is lost: {_fallen(version, stood)}")
        return versions

    def _why_lost(self, shard: int, error: ElastableError) -> str:
        """A version or a table that the shard says it has not had may be one that it had."""
        if isinstance(error, VersionError | TableNotFound):
            stood = self._stood
            told, _ = self._calls.outcomes({shard: self._stores[shard].version})
            if told.get(shard, stood) < stood:
                return _fallen(told[shard], stood)
        return super()._why_lost(shard, error)

    def _refuse_far_behind(self, versions: Mapping[int, int]) -> None:
        """Raises `ShardLost` where shards are further apart than a commit that broke off leaves them."""
        newest = max(versions.values())
        for shard, version in sorted(versions.items()):
            if version < newest - 1:
                raise ShardLost(
                    f"shard {shard} of {self.shards} is lost: it stands at version {version}, and others at {newest}"
                )

    def _refuse_remains(self, table: Partition) -> None:
        """Raises `ShardLost` where some shards hold rows of a table that others lack: they are no table's beginning."""
        name = table.spec.name
        there = [number for number, spec in enumerate(self._held().get(name, ())) if spec is not None]
        counts = self._calls.run({number: partial(self._stores[number].row_count, name) for number in there})
        if any(counts.values()):
            lacking = ", ".join(str(shard) for shard in table.holders if shard not in there)
            raise ShardLost(
                f"shard {lacking} of {self.shards} is lost: it lacks table {name!r}, of which others hold "
                f"{sum(counts.values())} rows; drop the table, or begin with --overwrite"
            )

    def _refuse_another_beginning(self, table: Partition) -> None:
        """Where a `create_table` broke off, it can only be completed by the same one."""
        for wanted, held in zip(table.shards, self._held().get(table.spec.name, table.shards), strict=True):
            if held is not None and held != wanted:
                refuse_conflict(held.origin.table or held, table.spec)
                raise SpecConflict(f"table {table.spec.name!r} was begun with another strategy; drop it first")

    def _on_all(self, call: Callable[[EmbeddingStore], None]) -> None:
        self._calls.run({number: partial(call, store) for number, store in enumerate(self._stores)})

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One change after the other."""
        if not self._changing.acquire(timeout=self._timeout_s):
            raise DeadlineExceeded(
                f"another change of the partitioned store has not ended within {self._timeout_s:g} s"
            )
        try:
            self._require_open()
            yield
        finally:
            self._changing.release()


def _fallen(version: int, stood: int) -> str:
    return f"it stands at version {version}, and stood at {stood}: it was started again without its rows"
