"""The cost of splitting a table: token and encoding over two stores in memory, compared with one store.

24 batches of uniform ids and several outputs take turns, so that rows come from
memory rather than a cache. Two stores in one process gain nothing: the figure
is the cost of splitting and joining.

    python -m benchmarks.tables.partitions
"""

from collections.abc import Callable, Iterator
from itertools import count, cycle

import numpy as np

from benchmarks.harness import Row, compare, interleaved, publish, rate
from benchmarks.tables.table_filling import filled_blocks
from elastable.embedding_store.composite.partitioned_store import PartitionedStore
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.native.range_pool import available_cores
from elastable.process.heap import keep_freed_memory

_SHAPES = ((2_000_000, 8, 65_536), (2_000_000, 64, 65_536), (250_000, 512, 16_384))
"""Rows, values in a row, ids of a batch."""

_BATCHES, _OUTPUTS, _ROUNDS = 24, 4, 7
_STRATEGIES = ("token", "encoding")


def main() -> None:
    """Measures, prints and writes `results/partitions.json`."""
    publish("partitions", f"Tables over two stores in memory, {available_cores()} cores", measured())


def measured() -> list[Row]:
    """The rows of the table: every figure compared with that of one store."""
    keep_freed_memory()  # as every process of the `elastable` command does
    return [row for shape in _SHAPES for row in _of_shape(*shape)]


def _of_shape(rows: int, dim: int, batch: int) -> Iterator[Row]:
    random = np.random.default_rng(2026)
    batches = [random.integers(0, rows, batch) for _ in range(_BATCHES)]
    stores: dict[str, EmbeddingStore] = {
        "one": MemoryStore(),
        **{name: PartitionedStore([MemoryStore() for _ in range(2)], name) for name in _STRATEGIES},
    }
    spec = TableSpec("t", dim, rows, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.01))
    for store in stores.values():
        store.create_table(spec)
        store.put("t", filled_blocks(rows, dim, np.ones(dim, np.float32)))
    for what, work in (("lookup", _looking_up), ("commit, Adagrad", _committing)):
        contenders = {name: rate(work(store, batches, dim), batch) for name, store in stores.items()}
        rounds = interleaved(contenders, _ROUNDS)
        for name in _STRATEGIES:
            yield compare(f"{what}, {rows:,} x {dim}, {name} over 2", "rows/s", rounds[name], rounds["one"])
    for store in stores.values():
        store.close()


def _looking_up(store: EmbeddingStore, batches: list[Int64], dim: int) -> Callable[[], object]:
    table, ids = store.table("t"), cycle(batches)
    outputs = cycle([np.empty((len(batches[0]), dim), np.float32) for _ in range(_OUTPUTS)])
    return lambda: table.lookup(next(ids), out=next(outputs))


def _committing(store: EmbeddingStore, batches: list[Int64], dim: int) -> Callable[[], object]:
    gradients = np.random.default_rng(1).standard_normal((len(batches[0]), dim), dtype=np.float32)
    updates = cycle([TableUpdate(ids, gradients[: len(ids)]) for ids in (np.unique(batch) for batch in batches)])
    versions = count(1)
    return lambda: store.commit(Commit(next(versions), {"t": next(updates)}, 1, {}))


if __name__ == "__main__":
    main()
