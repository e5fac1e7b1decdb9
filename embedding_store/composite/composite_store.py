"""Several stores as one, at one version."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import methodcaller
from typing import Generic, TypeVar

import numpy as np

from elastable.embedding_store.composite.partitions import Part, Partition, SplitLookup, TableSplits
from elastable.embedding_store.composite.store_group import (
    RECORD_STORE,
    CommitCoordinator,
    StoreGroup,
    recovery_version,
)
from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import Commit, FlushStatus, RowBlock, TableState, TableStatistics
from elastable.embedding_store.contract.row_source import LookupRequest, RowSource
from elastable.embedding_store.contract.snapshot import (
    PinStatistics,
    Snapshot,
    joined_pins,
    refuse_while_pinned,
    require_lease,
)
from elastable.embedding_store.contract.spec import TableSpec, refuse_conflict
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import ShardLost, SpecConflict, StaleVersion
from elastable.embedding_store.measures import LookupCounts, StoreMeasures
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.tables.checks import require_block, require_block_rows, require_ids, require_version
from elastable.embedding_store.tables.lookups import require_width, rows_request
from elastable.embedding_store.tables.row_blocks import chosen_rows, joined_rows, rows_in_order
from elastable.embedding_store.tables.table import BaseStore

_FEW_VALUES = 1 << 14  # stores in memory write fewer before a thread has started

Source = TypeVar("Source", bound=RowSource)
Readable = TypeVar("Readable", bound=Snapshot)


class CompositeSource(RowSource, Generic[Source]):
    """Several sources as one. All of them are asked at the same time, and errors name the one they come from.

    Attributes:
        group: The sources; closed with this one.
        lookups: That succeeded, by table and number of the source.
    """

    def __init__(self, group: StoreGroup[Source]) -> None:
        self.group = group
        self.lookups = LookupCounts()

    def specs(self) -> dict[str, TableSpec]:
        """Whole tables; one of which a store lacks its part is left out."""
        self.group.reload()
        return {name: found.spec for name, found in self.group.tables.items()}

    def version(self) -> int:
        """The version that every store has reached."""
        return min(self.group.versions().values())

    def wait_for_version(self, version: int, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s

        def wait(source: Source) -> bool:
            return source.wait_for_version(version, max(0.0, end - time.monotonic()))

        return all(self.group.each(wait).values())

    def lookup(self, ids: Mapping[str, Int64], version: int | None = None) -> dict[str, Float32]:
        """Rows of many tables. A `version` is checked on every store, also on those that hold none of the rows."""
        requests = [rows_request(self.group.partition(name).spec, of) for name, of in ids.items()]
        self.lookup_into(requests, version)
        return {request.table: request.out for request in requests}

    def lookup_into(self, requests: Sequence[LookupRequest], version: int | None = None, split: bool = True) -> None:
        with self.group.lock.reading():
            self.group.require_open()
            if version is None and self.group.apart is not None:
                self.group.require_one_version()
            tables = [self.group.partition(request.table) for request in requests]
            for table, request in zip(tables, requests, strict=True):
                require_width(request, table.spec.dim)
                require_ids(table.spec, request.ids)
            lookup = SplitLookup(tables, requests)
            sources = self.group.sources
            stores = lookup.asked if version is None else range(len(sources))
            calls = {n: partial(sources[n].lookup_into, lookup.asked.get(n, []), version, split) for n in stores}
            self.group.run(calls, together=not self.group.in_memory or lookup.values > _FEW_VALUES)
            lookup.finish()
        for number, asked in lookup.asked.items():
            for each in asked:
                self.lookups.add({each.table: each.ids}, str(number))

    def forget(self) -> None:
        for source in self.group.sources:
            source.forget()
        self.group.forget()

    @property
    def closed(self) -> bool:
        return self.group.closed

    def close(self) -> None:
        self.group.closed = True
        self.group.end_threads()
        for source in self.group.sources:
            source.close()


class CompositeReads(CompositeSource[Readable], Snapshot):
    """Reads of one version of several stores, pinned or current: counts, rows with their slots, scans."""

    def row_count(self, table: str) -> int:
        with self.group.lock.reading():  # else some stores might count rows of a commit that others have yet to make
            found = self.group.partition(table)
            return _total_rows(found, self.group.each(lambda store: store.row_count(table), found.holders))

    def read_rows(self, table: str, ids: Int64) -> RowBlock:
        with self.group.lock.reading():
            found = self.group.partition(table)
            parts = found.parts(require_ids(found.spec, ids))
            read = self.group.of_parts(parts, lambda store, part: store.read_rows(table, part.ids))
        if not found.whole_rows:
            return found.joined(list(read.values()))
        blocks = [replace(block, ids=found.whole_ids(shard, block.ids)) for shard, block in read.items()]
        return blocks[0] if len(blocks) == 1 else rows_in_order(ids, joined_rows(found.spec, blocks))

    def table_state(self, table: str) -> TableState:
        """The largest counts of all stores, which is enough for each of them; decay and times are the same in each."""
        with self.group.lock.reading():
            read = self.group.each(lambda store: store.table_state(table), self.group.partition(table).holders)
        states = list(read.values())
        counts = [state.admission_counts for state in states if state.admission_counts is not None]
        return TableState(
            np.maximum.reduce(counts) if counts else None, states[0].untouched_decay, states[0].touch_times
        )

    def scan(self, table: str, block_rows: int = 65_536) -> Iterator[RowBlock]:
        """Each block is of one version; a commit between two blocks shows in the later one."""
        return self._scan(self.group.partition(table), require_block_rows(block_rows))

    def _scan(self, table: Partition, block_rows: int) -> Iterator[RowBlock]:
        """The blocks of every store; where each has a part of all rows, those of the first, joined with the others'."""
        name, leading = table.spec.name, table.holders if table.whole_rows else table.holders[:1]
        others = [store for store in table.holders if store not in leading]
        for store in leading:
            blocks = self.group.sources[store].scan(name, block_rows)
            while True:
                with self.group.lock.reading():
                    block = self.group.run({store: partial(next, blocks, None)})[store]
                    if block is None:
                        break
                    read = self.group.each(methodcaller("read_rows", name, block.ids), others)
                    block, parts = _common(block, [read[other] for other in others])
                if table.whole_rows:
                    yield replace(block, ids=table.whole_ids(store, block.ids))
                elif len(block.ids):
                    yield table.joined([block, *parts])


def _total_rows(table: Partition, counts: Mapping[int, int]) -> int:
    """The rows of a table by the counts of its stores: with the encoding partition each store counts the same rows."""
    return sum(counts.values()) if table.whole_rows else next(iter(counts.values()))


def _total_statistics(table: Partition, parts: Mapping[int, TableStatistics]) -> TableStatistics:
    counts = {
        name: _total_rows(table, {store: getattr(of, name) for store, of in parts.items()})
        for name in ("rows", "refused", "evicted", "deleted", "written")
    }
    sizes = [of.bytes for of in parts.values() if of.bytes is not None]
    return TableStatistics(bytes=sum(sizes) if len(sizes) == len(parts) else None, **counts)


def _common(leading: RowBlock, others: list[RowBlock]) -> tuple[RowBlock, list[RowBlock]]:
    """The rows that all of them have; some may have been cleared since the first was read."""
    if all(len(block.ids) == len(leading.ids) for block in others):
        return leading, others
    ids = reduce(np.intersect1d, [block.ids for block in others], leading.ids)
    first, *rest = (chosen_rows(block, np.isin(block.ids, ids)) for block in (leading, *others))
    return first, rest


class CompositeSnapshot(CompositeReads[Snapshot]):
    """One version of several stores, pinned on each of them.

    If the pin of one store is gone, reads of what that store holds raise `StaleVersion` and name the store.

    Args:
        pins: One of each store, in the order of the stores, all of the same version; closed with this one.
        splits: Which store holds which part of a table.
        version: The pinned version.
        timeout_s: As of `StoreGroup`.
    """

    def __init__(self, pins: Sequence[Snapshot], splits: TableSplits, version: int, timeout_s: float) -> None:
        gone = f"the pin of version {version} is gone: it was released"
        super().__init__(StoreGroup(pins, splits, timeout_s, lambda: StaleVersion(gone)))
        self._version = version

    def version(self) -> int:
        return self._version

    def renew(self, lease_s: float | None = None) -> None:
        self.group.require_open()
        self.group.each(lambda pin: pin.renew(lease_s))

    def close(self) -> None:
        """Frees the version on every store; on one that cannot be reached the lease runs out."""
        if not self.group.closed:
            self.group.closed = True
            try:
                self.group.each(lambda pin: pin.close())
            finally:
                self.group.end_threads()


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
        timeout_s: As of `StoreGroup`.
        repairs_unknown: Whether a commit may complete one that another process began, which nobody can compare with it;
            else `recover` comes first.

    Raises:
        BadInput: there are no stores, or one is given twice.
    """

    snapshot: type[CompositeSnapshot] = CompositeSnapshot
    """What `pin` makes of the pins of all stores."""

    def __init__(
        self, stores: Sequence[EmbeddingStore], splits: TableSplits, timeout_s: float, repairs_unknown: bool = False
    ) -> None:
        super().__init__(StoreGroup(stores, splits, timeout_s))
        self._commits = CommitCoordinator(self.group, repairs_unknown)
        versions = self.group.versions().values()
        if min(versions) < max(versions):
            self.group.apart = "a commit broke off; repeat it, or recover the store"
        self.group.reached = min(versions)

    def create_table(self, spec: TableSpec) -> bool:
        """Makes the table, or completes one that some stores lack. Raises `BadSpec`, or `Unsupported`."""
        with self.group.alone():
            self.group.reload()
            known = self.group.tables.get(spec.name)
            if known is not None:
                refuse_conflict(known.spec, spec)
                return False
            table = self.group.splits.plan(spec)
            self._refuse_leftovers(table)
            calls = {
                number: partial(self.group.sources[number].create_table, part)
                for number, part in enumerate(table.shards)
                if part is not None
            }
            created, errors = self.group.outcomes(calls)
            if errors:
                # A store refused its part: what is new on the others is dropped again.
                drops = {n: partial(self.group.sources[n].drop_table, spec.name) for n, new in created.items() if new}
                self.group.outcomes(drops)
                self.group.raise_first(errors)
            self.group.reload()
            return True

    def drop_table(self, table: str) -> None:
        """Drops the table, also what an interrupted drop has left of it."""
        with self.group.alone(), self.group.lock.writing():
            holders = [number for number, spec in enumerate(self.group.held().get(table, ())) if spec is not None]
            if not holders:
                raise self.group.no_table(table)
            self._refuse_while_pinned(f"table {table!r} cannot be dropped")
            self.group.tables.pop(table, None)
            self.group.each(lambda store: store.drop_table(table), holders)

    def commit(self, commit: Commit) -> None:
        with self.group.alone():
            finish = self._staged(commit)
            with self.group.lock.writing():
                finish()

    def stage(self, commit: Commit) -> Callable[[], None]:
        with self.group.alone():
            finish_all = self._staged(commit)

        def finish() -> None:
            with self.group.alone(), self.group.lock.writing():
                finish_all()

        return finish

    @property
    def keeps_records(self) -> bool:
        return all(self.group.each(lambda store: store.keeps_records, together=False).values())

    def record(self) -> bytes | None:
        with self.group.lock.reading():
            self.group.require_one_version()
            return self.group.each(lambda store: store.record(), (RECORD_STORE,))[RECORD_STORE]

    def other_writer(self) -> str | None:
        writers = self.group.each(lambda store: store.other_writer(), together=not self.group.in_memory)
        return next(filter(None, writers.values()), None)

    def require_owner(self) -> None:
        self.group.each(lambda store: store.require_owner(), together=not self.group.in_memory)

    def recover(self, version: int | None = None) -> int:
        """Takes back what some stores did of a commit; None: to the version that all of them have reached.

        Returns:
            Rows taken back on all stores; with the encoding partition each part of a row counts.
        """
        with self.group.alone(), self.group.lock.writing():
            target = recovery_version(self.group.versions(), version, self.group.splits.stores)
            self.group.apart = "a commit is being taken back; do that again"
            taken = self.group.each(lambda store: store.recover(target))
            self._now_at(target)
        return sum(taken.values())

    def reset_version(self, version: int, record: bytes | None = None) -> None:
        require_version(version)
        with self.group.alone(), self.group.lock.writing():
            self._refuse_while_pinned(f"the version cannot be reset to {version}")
            self.group.apart = f"not every store has been reset to version {version}"
            self.group.reached = 0
            first = self.group.sources[RECORD_STORE]
            self.group.each(lambda store: store.reset_version(version, record if store is first else None))
            self._now_at(version)

    def pin(self, version: int | None = None, lease_s: float = 60.0) -> Snapshot:
        """Pins a version on every store, or on none."""
        require_lease(lease_s)
        with self.group.alone():
            wanted = self.group.require_one_version() if version is None else version
            calls = {number: partial(store.pin, wanted, lease_s) for number, store in enumerate(self.group.sources)}
            pins, errors = self.group.outcomes(calls)
            if errors:
                self.group.outcomes({number: pin.close for number, pin in pins.items()})
                self.group.raise_first(errors)
        return self.snapshot([*map(pins.__getitem__, calls)], self.group.splits, wanted, self.group.timeout_s)

    def pins(self) -> tuple[PinStatistics, ...]:
        return joined_pins(list(self.group.each(lambda store: store.pins()).values()))

    def read_ahead(self, ids: Mapping[str, Int64]) -> None:
        wanted: dict[int, dict[str, Int64]] = {}
        with self.group.lock.reading():
            for name, of in ids.items():
                found = self.group.partition(name)
                for part in found.parts(require_ids(found.spec, of)):
                    wanted.setdefault(part.shard, {})[name] = part.ids
        self.group.run({n: partial(self.group.sources[n].read_ahead, of) for n, of in wanted.items()})

    def flush_status(self) -> FlushStatus | None:
        return FlushStatus.of_all([*self.group.each(lambda store: store.flush_status(), together=False).values()])

    def measures(self) -> StoreMeasures:
        return StoreMeasures.of_all([*self.group.each(lambda store: store.measures(), together=False).values()])

    def put(self, table: str, blocks: Iterable[RowBlock]) -> None:
        """Writes one block after the other, each to all stores at once."""
        found = self.group.partition(table)
        optimizer = row_optimizer(found.spec.optimizer)
        for given in blocks:
            block = require_block(found.spec, optimizer, given)

            def put(store: EmbeddingStore, part: Part, block: RowBlock = block) -> None:
                store.put(table, [found.block(part, block)])

            with self.group.alone(), self.group.lock.writing():
                self.group.of_parts(found.parts(block.ids), put)

    def delete(self, table: str, ids: Int64) -> int:
        """Deletes rows; repeat it if a store failed."""
        with self.group.alone(), self.group.lock.writing():
            found = self.group.partition(table)
            parts = found.parts(require_ids(found.spec, ids))
            return _total_rows(found, self.group.of_parts(parts, lambda store, part: store.delete(table, part.ids)))

    def table_statistics(self, table: str) -> TableStatistics:
        found = self.group.partition(table)
        with self.group.lock.reading():
            parts = self.group.each(lambda store: store.table_statistics(table), found.holders)
        return _total_statistics(found, parts)

    def put_table_state(self, table: str, state: TableState) -> None:
        with self.group.alone(), self.group.lock.writing():
            self.group.each(lambda store: store.put_table_state(table, state), self.group.partition(table).holders)

    def clear(self, table: str) -> None:
        with self.group.alone(), self.group.lock.writing():
            self._refuse_while_pinned(f"table {table!r} cannot be cleared")
            self.group.each(lambda store: store.clear(table), self.group.partition(table).holders)

    def _refuse_while_pinned(self, what: str) -> None:
        """Asks every store before anything is changed on one."""
        pins = self.group.each(lambda store: store.pins())
        refuse_while_pinned(what, [pin.version for of_store in pins.values() for pin in of_store])

    def _staged(self, commit: Commit) -> Callable[[], None]:
        tables = [self.group.partition(name) for name in commit.updates]
        finish_all = self._commits.stage(commit, tables, self.group.versions())

        def finish() -> None:
            self.group.apart = f"the commit of version {commit.version} broke off; repeat it"
            finish_all()
            self._now_at(commit.version)

        return finish

    def _now_at(self, version: int) -> None:
        self.group.now_at(version)
        self._commits.forget()

    def _refuse_leftovers(self, table: Partition) -> None:
        """Refuses to complete a table that was begun with another spec, or of which some stores hold rows.

        Raises:
            SpecConflict: an interrupted `create_table` had another spec, or split the table otherwise.
            ShardLost: some stores hold rows of the table that others lack.
        """
        name = table.spec.name
        there = {number: spec for number, spec in enumerate(self.group.held().get(name, ())) if spec is not None}
        for number, spec in there.items():
            if spec != table.shards[number]:
                refuse_conflict(spec.origin.table or spec, table.spec)
                raise SpecConflict(f"table {name!r} was begun with another strategy; drop it first")
        counts = self.group.each(lambda store: store.row_count(name), there)
        if any(counts.values()):
            lacking = ", ".join(self.group.splits.stores[number] for number in table.holders if number not in there)
            raise ShardLost(
                f"{lacking} is lost: it lacks table {name!r}, of which others hold {sum(counts.values())} rows; drop "
                "the table, or begin with --overwrite"
            )
