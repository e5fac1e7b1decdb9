"""The cost of splitting a table: token and encoding over two stores in memory, compared with one store.

24 batches of uniform ids and several outputs take turns, so that rows come from
memory rather than a cache. Two stores in one process gain nothing: the figure
is the cost of splitting and joining.

    python -m benchmarks.tables.partitions
"""

from collections.abc import Iterator

import numpy as np

from benchmarks.harness import Row, compare, publish, rates
from benchmarks.tables.table_work import commit, fill, look_up, updates_of
from elastable.embedding_store.composite.partitioned_store import PartitionedStore
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.native.range_pool import available_cores
from elastable.process.heap import keep_freed_memory

_SHAPES = ((2_000_000, 8, 65_536), (2_000_000, 64, 65_536), (250_000, 512, 16_384))
"""Rows, values in a row, ids of a batch."""

_BATCHES, _OUTPUTS, _ROUNDS = 24, 4, 7
_STRATEGIES = ("token", "encoding")


def main() -> None:
    """Measures, prints and writes `results/partitions.json`."""
    keep_freed_memory()  # as every process of the `elastable` command does
    rows = [row for shape in _SHAPES for row in _of_shape(*shape)]
    publish("partitions", f"Tables over two stores in memory, {available_cores()} cores", rows)


def _of_shape(rows: int, dim: int, batch: int) -> Iterator[Row]:
    """Every figure compared with that of one store."""
    random = np.random.default_rng(2026)
    batches = [random.integers(0, rows, batch) for _ in range(_BATCHES)]
    updates = updates_of(batches, np.random.default_rng(1).standard_normal((batch, dim), dtype=np.float32))
    spec = TableSpec("t", dim, rows, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.01))
    split = {name: PartitionedStore([MemoryStore() for _ in range(2)], name) for name in _STRATEGIES}
    tables = {name: fill(store, spec) for name, store in {"one": MemoryStore(), **split}.items()}
    works = {
        "lookup": {name: look_up(table, batches, _OUTPUTS) for name, table in tables.items()},
        "commit, Adagrad": {name: commit(table.store, updates) for name, table in tables.items()},
    }
    for what, contenders in works.items():
        rounds = rates(contenders, batch, _ROUNDS)
        for name in _STRATEGIES:
            yield compare(f"{what}, {rows:,} x {dim}, {name} over 2", "rows/s", rounds[name], rounds["one"])
    for table in tables.values():
        table.store.close()


if __name__ == "__main__":
    main()
