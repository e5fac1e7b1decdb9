"""The memory store's kernels, compared with NumPy and memory bandwidth, on as many threads.

Batches of 65,536 uniform ids over a million rows of 64 values; batches take
turns, so that rows come from memory rather than a cache.

    python -m benchmarks.tables.store
"""

from itertools import cycle

import numpy as np

from benchmarks.harness import Row, Work, publish, versus
from benchmarks.tables.table_work import commit, copy, fill, look_up, take, updates_of
from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.native.range_pool import RangePool, available_cores
from elastable.embedding_store.tables.grouping import coalesce, unique_ids
from elastable.process.heap import keep_freed_memory

_ROWS, _DIM, _BATCH, _BATCHES = 1_000_000, 64, 65_536, 16
_ROUNDS = 7
_POOL = RangePool(available_cores())  # the same threads for all contenders
_SLOTS = {"sgd": 0, "adagrad": 1, "adam": 2}  # values per weight


def main() -> None:
    """Measures, prints and writes `results/store.json`."""
    keep_freed_memory()  # as every process of the `elastable` command does
    random = np.random.default_rng(2026)
    batches = [random.integers(0, _ROWS, _BATCH) for _ in range(_BATCHES)]
    gradients = random.standard_normal((_BATCH, _DIM), dtype=np.float32)
    rows = [_lookup(batches), *(_commit(name, batches, gradients) for name in _SLOTS)]
    rows += [_unique(batches), _coalesce(batches, gradients)]
    publish("store", f"Memory store: {_BATCH:,} ids of {_ROWS:,} rows x {_DIM}, {_POOL.threads} threads", rows)


def _lookup(batches: list[Int64]) -> Row:
    with MemoryStore() as store:
        table = fill(store, _spec("sgd"))
        reference = take(table.lookup(np.arange(_ROWS)), batches, _POOL)
        return _against("lookup, against np.take into place", "rows/s", look_up(table, batches), reference)


def _commit(optimizer: str, batches: list[Int64], gradients: Float32) -> Row:
    """Against a copy that moves as many bytes: the gradient read, weights and slots read and written."""
    updates = updates_of(batches, gradients)
    changed = len(updates[0].ids)
    values = changed * _DIM * (1 + 2 * (1 + _SLOTS[optimizer])) // 2  # a copy reads a value and writes one
    with MemoryStore() as store:
        fill(store, _spec(optimizer))
        name = f"commit, {optimizer}, against copying as many bytes"
        return _against(name, "rows/s", commit(store, updates), copy(values, _POOL), changed)


def _unique(batches: list[Int64]) -> Row:
    ours, theirs = cycle(batches), cycle(batches)
    return _against(
        "unique ids and inverse, against np.unique",
        "ids/s",
        lambda: unique_ids(next(ours)),
        lambda: np.unique(next(theirs), return_inverse=True),
    )


def _coalesce(batches: list[Int64], gradients: Float32) -> Row:
    """Ids of which every one occurs about four times."""
    repeated = [batch % (_BATCH // 4) for batch in batches]
    ours, theirs = cycle(repeated), cycle(repeated)
    total = np.zeros((_BATCH // 4, _DIM), np.float32)
    return _against(
        "coalesce, against np.add.at",
        "rows/s",
        lambda: coalesce(next(ours), gradients),
        lambda: np.add.at(total, next(theirs), gradients),
    )


def _against(name: str, unit: str, ours: Work, theirs: Work, amount: int = _BATCH) -> Row:
    return versus(name, unit, ours, theirs, amount, _ROUNDS)


def _spec(optimizer: str) -> TableSpec:
    return TableSpec("t", _DIM, _ROWS, optimizer=OptimizerSpec.of(optimizer, learning_rate=0.01))


if __name__ == "__main__":
    main()
