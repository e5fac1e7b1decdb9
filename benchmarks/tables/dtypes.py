"""Lookups and Adagrad steps of tables of smaller dtypes, compared with float32 tables.

Batches of 65,536 uniform ids over 2 million rows of 64 values; 24 batches in
turn, so that rows come from memory rather than a cache.

    python -m benchmarks.tables.dtypes
"""

from collections.abc import Callable, Iterator
from itertools import count, cycle

import numpy as np

from benchmarks.harness import Row, compare, interleaved, publish, rate
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import WEIGHT_DTYPES, OptimizerSpec, TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.native.range_pool import available_cores
from elastable.process.heap import keep_freed_memory

_ROWS, _DIM, _BATCH, _BATCHES = 2_000_000, 64, 65_536, 24
_ROUNDS = 5


def main() -> None:
    """Measures, prints and writes `results/dtypes.json`."""
    keep_freed_memory()
    random = np.random.default_rng(2026)
    batches = [random.integers(0, _ROWS, _BATCH) for _ in range(_BATCHES)]
    gradients = random.standard_normal((_BATCH, _DIM), dtype=np.float32)
    updates = [TableUpdate(ids, gradients[: len(ids)]) for ids in (np.unique(batch) for batch in batches)]
    stores = {dtype: _filled(dtype) for dtype in WEIGHT_DTYPES}
    rows = _compared("lookup", {dtype: _lookup(store, batches) for dtype, store in stores.items()})
    trained = {dtype: store for dtype, store in stores.items() if dtype != "int8"}
    rows += _compared("Adagrad", {dtype: _commit(store, updates) for dtype, store in trained.items()})
    publish("dtypes", f"{_BATCH:,} ids of {_ROWS:,} rows x {_DIM}, {available_cores()} cores", rows)
    for store in stores.values():
        store.close()


def _lookup(store: MemoryStore, batches: list[Int64]) -> Callable[[], float]:
    turns = cycle(batches)
    return rate(lambda: store.lookup({"t": next(turns)}), _BATCH)


def _commit(store: MemoryStore, updates: list[TableUpdate]) -> Callable[[], float]:
    versions, turns = count(1), cycle(updates)

    def step() -> None:
        version = next(versions)
        store.commit(Commit(version, {"t": next(turns)}, version, {}))

    return rate(step, len(updates[0].ids))


def _compared(what: str, contenders: dict[str, Callable[[], float]]) -> list[Row]:
    rounds = interleaved(contenders, _ROUNDS)
    return [
        compare(f"{what}, {dtype}, against float32", "rows/s", rounds[dtype], rounds["float32"])
        for dtype in contenders
        if dtype != "float32"
    ]


def _filled(dtype: str) -> MemoryStore:
    """A store whose table "t" has all its rows."""
    optimizer = OptimizerSpec() if dtype == "int8" else OptimizerSpec.of("adagrad", learning_rate=0.01)
    store = MemoryStore()
    store.create_table(TableSpec("t", _DIM, _ROWS, dtype, optimizer=optimizer))
    store.put("t", _blocks(0 if dtype == "int8" else _DIM))
    return store


def _blocks(slot_width: int) -> Iterator[RowBlock]:
    weights = np.random.default_rng(0).standard_normal((1 << 16, _DIM), dtype=np.float32)
    slots = np.ones((1 << 16, slot_width), np.float32)
    for start in range(0, _ROWS, 1 << 16):
        ids = np.arange(start, min(start + (1 << 16), _ROWS), dtype=np.int64)
        yield RowBlock(ids, weights[: len(ids)], slots[: len(ids)])


if __name__ == "__main__":
    main()
