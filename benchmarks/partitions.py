"""What it costs to split a table: token and encoding over two stores in memory, against one store.

Batches of 65,536 ids, uniform over 2,000,000 rows of 64 values; 24 batches
and several outputs in turn, so that rows come from memory and not from a cache.

    python -m benchmarks.partitions
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, cycle

import numpy as np

from benchmarks.harness import Row, compare, interleaved, publish, rate
from elastable.heap import keep_freed_memory
from embedding_store.memory import MemoryStore
from embedding_store.partitioned import PartitionedStore
from embedding_store.range_pool import available_cores
from embedding_store.spec import OptimizerSpec, TableSpec
from embedding_store.store import Commit, EmbeddingStore, RowBlock, TableUpdate

__all__ = ["main"]

_ROWS, _DIM, _BATCH, _BATCHES, _OUTPUTS = 2_000_000, 64, 65_536, 24, 6
_ROUNDS = 7
_SPEC = TableSpec("t", _DIM, _ROWS, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.01))


def main() -> None:
    """Measures, prints and writes `results/partitions.json`."""
    publish("partitions", f"Tables over two stores in memory, {available_cores()} cores", measured())


def measured() -> list[Row]:
    """The rows of the table: every figure beside that of one store."""
    keep_freed_memory()  # as every process of the `elastable` command does
    random = np.random.default_rng(2026)
    batches = [random.integers(0, _ROWS, _BATCH) for _ in range(_BATCHES)]
    stores: dict[str, EmbeddingStore] = {
        "one store": MemoryStore(),
        "token": PartitionedStore([MemoryStore() for _ in range(2)]),
        "encoding": PartitionedStore([MemoryStore() for _ in range(2)], "encoding"),
    }
    for store in stores.values():
        store.create_table(_SPEC)
        store.put("t", _blocks())
    lookups = {name: _looking_up(store, batches) for name, store in stores.items()}
    commits = {name: _committing(store, batches) for name, store in stores.items()}
    rows = []
    for what, contenders in (("lookup", lookups), ("commit, adagrad", commits)):
        rounds = interleaved({name: rate(work, _BATCH) for name, work in contenders.items()}, _ROUNDS)
        rows += [
            compare(f"{what}, {name} over 2, against one store", "rows/s", rounds[name], rounds["one store"])
            for name in ("token", "encoding")
        ]
    for store in stores.values():
        store.close()
    return rows


def _looking_up(store: EmbeddingStore, batches: list[np.ndarray]) -> Callable[[], object]:
    table, ids = store.table("t"), cycle(batches)
    outputs = cycle([np.empty((_BATCH, _DIM), np.float32) for _ in range(_OUTPUTS)])
    return lambda: table.lookup(next(ids), out=next(outputs))


def _committing(store: EmbeddingStore, batches: list[np.ndarray]) -> Callable[[], object]:
    gradients = np.random.default_rng(1).standard_normal((_BATCH, _DIM), dtype=np.float32)
    updates = cycle([TableUpdate(ids, gradients[: len(ids)]) for ids in (np.unique(batch) for batch in batches)])
    versions = count(1)
    return lambda: store.commit(Commit(next(versions), {"t": next(updates)}, 1, {}))


def _blocks() -> Iterator[RowBlock]:
    for start in range(0, _ROWS, 1 << 17):
        ids = np.arange(start, min(_ROWS, start + (1 << 17)))
        yield RowBlock(ids, np.ones((len(ids), _DIM), np.float32), np.ones((len(ids), _DIM), np.float32))


if __name__ == "__main__":
    main()
