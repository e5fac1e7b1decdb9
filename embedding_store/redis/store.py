"""The store whose rows lie in Redis or Valkey, one server or a Cluster."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from embedding_store.checks import require_block, require_block_rows, require_ids, require_update
from embedding_store.errors import BadIds, DeadlineExceeded, StoreFailed, Unavailable, Unsupported
from embedding_store.redis.block import Block, TableRows
from embedding_store.redis.catalog import Catalog, TableKeys
from embedding_store.redis.connection import Deadline
from embedding_store.redis.deletion import deletions, rows_deleted
from embedding_store.redis.reader import RedisReader
from embedding_store.redis.schema import STAMP_FIELD, TableRecord, slots_key, tables_key, version_key, weights_key
from embedding_store.redis.transfer import Reading, read_block, write_block
from embedding_store.redis.url import RedisUrl
from embedding_store.row_blocks import joined_rows
from embedding_store.row_dtypes import round_update
from embedding_store.row_optimizer import row_optimizer
from embedding_store.spec import TableSpec
from embedding_store.store import (
    Commit,
    EmbeddingStore,
    Float32,
    Int64,
    RowBlock,
    TableStatistics,
    TableUpdate,
    refuse_conflict,
    refuse_negative_version,
    refuse_other_version,
)

__all__ = ["RedisStore"]

_NEVER_CHANGED = bytes(8)  # the stamp 0
_SCAN_BYTES = 1 << 22  # of one HSCAN reply, about

_Staged = tuple[Block, Int64]
"""Updated rows, and which of the block's commands write partitions that do not have them yet."""


class RedisStore(RedisReader, EmbeddingStore):
    """Embedding tables in Redis. One process writes; any number read.

    What a commit promises today: it reads the rows and slots it changes, runs
    the same kernels on them as the memory store, writes each partition in one
    transaction together with the version stamp of the partition, and advances
    the store's version last. So a partition is changed whole or not at all,
    and the version stands only once every partition does. A commit that fails
    half way leaves some partitions changed, and raises `StoreFailed`; the
    version has not advanced, and lookups at the old version that meet a
    changed partition are refused. Repeating the same commit, from this process
    or another, leaves out the partitions that bear its stamp and ends in the
    very rows that an undisturbed commit would have made.
    """

    def __init__(self, url: str | RedisUrl) -> None:
        """Connects; raises as `RedisReader` does."""
        super().__init__(url)
        self._writing = threading.Lock()
        self._unfinished: int | None = None
        self._deleted: Counter[str] = Counter()
        self._written: Counter[str] = Counter()

    def create_table(self, spec: TableSpec) -> bool:
        """As in `EmbeddingStore.create_table`; raises `BadSpec` for an unknown optimizer.

        An existing table keeps the number of partitions it was made with.
        Raises `Unsupported` for admission and eviction.
        """
        for part in ("admission", "eviction"):
            if getattr(spec, part) is not None:
                raise Unsupported(
                    f"table {spec.name!r}: redis has no {part}; keep the table in a store in memory, or leave "
                    f"{part} out and delete rows by their ids"
                )
        row_optimizer(spec.optimizer)
        deadline = self._deadline()
        key, record = tables_key(self.url.namespace), TableRecord(spec, self.url.partitions)
        self._reload(deadline)
        created = False
        if spec.name not in self._catalog.tables:
            # Stamps first: a table in the registry has all its partitions.
            stamped = [weights_key(self.url.namespace, spec.name, p) for p in range(record.partitions)]
            self._topology.call([(k, ("HSETNX", k, STAMP_FIELD, _NEVER_CHANGED)) for k in stamped], deadline)
            words = ("HSETNX", key, spec.name, record.to_json())
            created = bool(self._topology.call([(key, words)], deadline)[0])
            self._reload(deadline)
        refuse_conflict(self._catalog.table(spec.name).spec, spec)
        return created

    def commit(self, commit: Commit) -> None:
        """As in `EmbeddingStore.commit`, with what the class promises.

        Raises:
            StoreFailed: also when the connection broke in the middle: repeat the commit.
        """
        deadline = self._deadline()
        with self._alone(deadline):
            self._finish(commit, self._stage(commit, deadline), deadline)

    def stage(self, commit: Commit) -> Callable[[], None]:
        """As in `EmbeddingStore.stage`: rows are read and updated, and not written before the second half."""
        deadline = self._deadline()
        with self._alone(deadline):
            staged = self._stage(commit, deadline)

        def finish() -> None:
            deadline = self._deadline()
            with self._alone(deadline):
                self._finish(commit, staged, deadline)

        return finish

    @contextmanager
    def _alone(self, deadline: Deadline) -> Iterator[None]:
        if not self._writing.acquire(timeout=deadline.seconds):
            raise DeadlineExceeded(f"another commit to {self.url} has not ended within {deadline.seconds:g} s")
        try:
            yield
        finally:
            self._writing.release()

    def _stage(self, commit: Commit, deadline: Deadline) -> _Staged | None:
        """The rows of a commit, read and updated in memory; None if it stands already."""
        catalog = self._catalog_with(commit.updates, deadline)
        updates = {name: require_update(catalog.tables[name].spec, u) for name, u in commit.updates.items()}
        block = _block(catalog, {name: update.ids for name, update in updates.items()})
        reading = read_block(self._topology, block, deadline, version_key(self.url.namespace))
        if reading.version == commit.version == self._unfinished:
            return None  # only the answer to its very last step was lost
        refuse_other_version(reading.version, commit.version - 1)
        _refuse_foreign_stamps(reading, commit.version)
        untouched = reading.stamps < commit.version
        for name, rows in block.tables.items():
            rates = commit.learning_rates
            _apply(rows, updates[name], _positions(block, rows, untouched), commit.step, rates.get(name))
        return block, np.flatnonzero(untouched)

    def _finish(self, commit: Commit, staged: _Staged | None, deadline: Deadline) -> None:
        if staged is not None:
            try:
                write_block(self._topology, *staged, deadline, commit.version)
                self._set_version(commit.version, deadline)
            except (StoreFailed, Unavailable) as error:
                self._unfinished = commit.version
                raise StoreFailed(
                    f"the commit of version {commit.version} broke off, partitions may have changed; "
                    f"repeat the same commit to finish it: {error}"
                ) from error
        self._unfinished = None

    def reset_version(self, version: int) -> None:
        """As in `EmbeddingStore.reset_version`; every partition's stamp becomes 0."""
        refuse_negative_version(version)
        deadline = self._deadline()
        self._reload(deadline)
        keys = [
            weights_key(self.url.namespace, name, partition)
            for name, table in self._catalog.tables.items()
            for partition in range(table.partitions)
        ]
        self._topology.call([(key, ("HSET", key, STAMP_FIELD, _NEVER_CHANGED)) for key in keys], deadline)
        self._set_version(version, deadline)
        self._unfinished = None

    def row_count(self, table: str) -> int:
        """As in `EmbeddingStore.row_count`."""
        deadline = self._deadline()
        keys = self._weights_keys(self._table(table, deadline))
        lengths: list[int] = self._topology.call([(key, ("HLEN", key)) for key in keys], deadline)
        if min(lengths) == 0:
            raise StoreFailed(f"redis at {self.url} has lost partition {lengths.index(0)} of table {table!r}")
        return sum(lengths) - len(keys)  # each holds its stamp, too

    def scan(self, table: str, block_rows: int = 65_536) -> Iterator[RowBlock]:
        """As in `EmbeddingStore.scan`; the deadline holds for each block by itself."""
        return self._blocks(self._table(table, self._deadline()), require_block_rows(block_rows))

    def read_rows(self, table: str, ids: Int64) -> RowBlock:
        """As in `EmbeddingStore.read_rows`, in one round trip."""
        found = self._table(table, self._deadline())
        rows = next(self._rows_of(found, require_ids(found.spec, ids)), None)
        return joined_rows(found.spec, [] if rows is None else [rows])

    def put(self, table: str, blocks: Iterable[RowBlock]) -> None:
        """As in `EmbeddingStore.put`, one block after another, the deadline for each by itself."""
        spec = self._table(table, self._deadline()).spec
        slot_width = row_optimizer(spec.optimizer).slot_width(spec.dim)
        for given in blocks:
            checked = require_block(spec, slot_width, given)
            block = _block(self._catalog, {table: checked.ids})
            block.tables[table].weights[:] = checked.weights
            block.tables[table].slots[:] = checked.slots
            write_block(self._topology, block, np.arange(len(block.weights)), self._deadline())
            self._written[table] += len(checked.ids)

    def delete(self, table: str, ids: Int64) -> int:
        """As in `EmbeddingStore.delete`, each partition at once or not at all; repeat it where it broke off."""
        deadline = self._deadline()
        found = self._table(table, deadline)
        commands = deletions(self.url.namespace, found, require_ids(found.spec, ids))
        with self._alone(deadline):
            self._topology.refresh(deadline)  # a transaction cannot be redirected in its middle
            deleted = rows_deleted(self._topology.call(commands, deadline))
        self._deleted[table] += deleted
        return deleted

    def table_statistics(self, table: str) -> TableStatistics:
        """As in `EmbeddingStore.table_statistics`; what other clients did is not counted."""
        return TableStatistics(self.row_count(table), deleted=self._deleted[table], written=self._written[table])

    def clear(self, table: str) -> None:
        """As in `EmbeddingStore.clear`, partition by partition."""
        self._written[table] += 1
        deadline = self._deadline()
        found = self._table(table, deadline)
        self._topology.refresh(deadline)  # a transaction cannot be redirected in its middle
        commands: list[tuple[bytes, tuple[Any, ...]]] = []
        for partition, key in enumerate(self._weights_keys(found)):
            slots = slots_key(self.url.namespace, table, partition)
            stamp = ("HSET", key, STAMP_FIELD, _NEVER_CHANGED)
            commands += [(key, words) for words in (("MULTI",), ("UNLINK", key, slots), stamp, ("EXEC",))]
        self._topology.call(commands, deadline)

    def drop_table(self, table: str) -> None:
        """As in `EmbeddingStore.drop_table`.

        The registry forgets the table last: a drop that broke off is repeated,
        and no row of the old table shows up in a new one of its name.
        """
        deadline = self._deadline()
        found = self._table(table, deadline)
        keys = [(key, slots_key(self.url.namespace, table, p)) for p, key in enumerate(self._weights_keys(found))]
        self._topology.call([(key, ("UNLINK", key, slots)) for key, slots in keys], deadline)
        registry = tables_key(self.url.namespace)
        self._topology.call([(registry, ("HDEL", registry, table))], deadline)
        self._reload(deadline)

    def _blocks(self, table: TableKeys, block_rows: int) -> Iterator[RowBlock]:
        waiting = np.empty(0, np.int64)
        for key in self._weights_keys(table):
            waiting = np.concatenate((waiting, self._ids_in(key, table.spec.weight_bytes)))
            while len(waiting) >= block_rows:
                yield from self._rows_of(table, waiting[:block_rows])
                waiting = waiting[block_rows:]
        yield from self._rows_of(table, waiting)

    def _ids_in(self, key: bytes, row_bytes: int) -> Int64:
        """All ids of a partition, each once: HSCAN may show one twice."""
        cursor, fields = b"0", list[bytes]()
        while True:
            words = ("HSCAN", key, cursor, "COUNT", max(1, min(10_000, _SCAN_BYTES // row_bytes)))
            cursor, found = self._topology.call([(key, words)], self._deadline())[0]
            fields += [field for field in found[::2] if len(field) == 8]
            if cursor == b"0":
                return np.unique(np.frombuffer(b"".join(fields), "<i8").astype(np.int64))

    def _rows_of(self, table: TableKeys, ids: Int64) -> Iterator[RowBlock]:
        name = table.spec.name
        block = _block(self._catalog, {name: ids})
        read_block(self._topology, block, self._deadline())
        rows = block.tables[name]
        _refuse_torn_rows(rows)
        kept = rows.no_weights == 0  # the table may have been cleared meanwhile
        if kept.any():
            yield RowBlock(ids[kept], rows.weights[kept], rows.slots[kept])

    def _set_version(self, version: int, deadline: Deadline) -> None:
        key = version_key(self.url.namespace)
        self._topology.call([(key, ("SET", key, version))], deadline)

    def _table(self, name: str, deadline: Deadline) -> TableKeys:
        return self._catalog_with((name,), deadline).table(name)

    def _weights_keys(self, table: TableKeys) -> list[bytes]:
        return [weights_key(self.url.namespace, table.spec.name, partition) for partition in range(table.partitions)]


def _block(catalog: Catalog, ids: Mapping[str, Int64]) -> Block:
    """A block with slots, of ids that stand once each."""
    specs = {name: catalog.tables[name].spec for name in ids}
    widths = {name: row_optimizer(spec.optimizer).slot_width(spec.dim) for name, spec in specs.items()}
    block = Block.of(catalog, ids, widths)
    for name, rows in block.tables.items():
        if rows.unique < len(rows.ids):
            position = int(np.argmax(rows.leaders != np.arange(len(rows.ids))))
            raise BadIds(f"table {name!r}: id {rows.ids[position]} stands at positions {rows.leaders[position]} "
                         f"and {position}; each id may stand once")  # fmt: skip
    return block


def _positions(block: Block, rows: TableRows, chosen: np.ndarray) -> Int64:
    """int64: positions of the table's rows that lie in the chosen partitions (bool `[commands]`)."""
    mine = block.weights[rows.commands]
    start = int(mine["row_at"][0]) if len(mine) else 0
    row_chosen = np.repeat(chosen[rows.commands], mine["rows"])
    return np.sort(block.positions[start : start + rows.unique][row_chosen])


def _apply(rows: TableRows, update: TableUpdate, positions: Int64, step: int, learning_rate: float | None) -> None:
    """One optimizer step on the rows at `positions`, in place; the others are left alone."""
    spec = rows.table.spec
    optimizer = row_optimizer(spec.optimizer)
    rate = optimizer.default_learning_rate if learning_rate is None else learning_rate
    _refuse_torn_rows(rows)
    rows.slots[rows.fill_missing()] = optimizer.initial_slots(spec.dim)
    squares = update.row_squares
    if len(positions) == len(rows.ids):
        optimizer.apply_columns(rows.weights, rows.slots, positions, update.gradients, squares, step, rate)
        round_update(spec, rows.ids, step, rows.weights)
        return
    weights, slots = rows.weights[positions], rows.slots[positions]
    gradients: Float32 = update.gradients[positions]
    squares = None if squares is None else squares[positions]
    optimizer.apply_columns(weights, slots, np.arange(len(positions)), gradients, squares, step, rate)
    round_update(spec, rows.ids[positions], step, weights)
    rows.weights[positions], rows.slots[positions] = weights, slots


def _refuse_torn_rows(rows: TableRows) -> None:
    """Raises `StoreFailed` where the store holds weights without slots, or slots without weights."""
    if rows.slots.shape[1] == 0:
        return
    torn = np.flatnonzero(rows.no_weights != rows.no_slots)
    if len(torn):
        what = "slots" if rows.no_slots[torn[0]] else "weights"
        raise StoreFailed(f"table {rows.table.spec.name!r}: the row of id {rows.ids[torn[0]]} has lost its {what}")


def _refuse_foreign_stamps(reading: Reading, version: int) -> None:
    newest = int(reading.stamps.max(initial=0))
    if newest > version:
        raise StoreFailed(f"a partition bears version {newest} while version {version} is committed: who else writes?")
