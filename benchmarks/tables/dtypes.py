"""Lookups and Adagrad steps of tables of smaller dtypes, compared with float32 tables.

Batches of 65,536 uniform ids over 2 million rows of 64 values; 24 batches in
turn, so that rows come from memory rather than a cache.

    python -m benchmarks.tables.dtypes
"""

import numpy as np

from benchmarks.harness import Row, Work, compare, publish, rates
from benchmarks.peers import workloads
from benchmarks.tables.table_work import commit, fill, look_up, updates_of
from elastable.embedding_store.contract.spec import WEIGHT_DTYPES, OptimizerSpec, TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.native.range_pool import available_cores
from elastable.process.heap import keep_freed_memory

_ROWS, _DIM, _BATCH = workloads.ROWS, workloads.DIM, workloads.BATCH
_ROUNDS = 5


def main() -> None:
    """Measures, prints and writes `results/dtypes.json`."""
    keep_freed_memory()
    batches = workloads.uniform()
    updates = updates_of(batches, np.random.default_rng(1).standard_normal((_BATCH, _DIM), dtype=np.float32))
    tables = {dtype: fill(MemoryStore(), _spec(dtype), random=np.random.default_rng(0)) for dtype in WEIGHT_DTYPES}
    rows = _compared("lookup", {dtype: look_up(table, batches) for dtype, table in tables.items()}, _BATCH)
    trained = {dtype: commit(table.store, updates) for dtype, table in tables.items() if dtype != "int8"}
    rows += _compared("Adagrad", trained, len(updates[0].ids))
    publish("dtypes", f"{_BATCH:,} ids of {_ROWS:,} rows x {_DIM}, {available_cores()} cores", rows)
    for table in tables.values():
        table.store.close()


def _compared(what: str, works: dict[str, Work], amount: int) -> list[Row]:
    rounds = rates(works, amount, _ROUNDS)
    return [
        compare(f"{what}, {dtype}, against float32", "rows/s", rounds[dtype], rounds["float32"])
        for dtype in works
        if dtype != "float32"
    ]


def _spec(dtype: str) -> TableSpec:
    optimizer = OptimizerSpec() if dtype == "int8" else OptimizerSpec.of("adagrad", learning_rate=0.01)
    return TableSpec("t", _DIM, _ROWS, dtype, optimizer=optimizer)


if __name__ == "__main__":
    main()
