"""The memory store's kernels, compared with NumPy and memory bandwidth, on as many threads.

Batches of 65,536 uniform ids over a million rows of 64 values; batches take
turns, so that rows come from memory rather than a cache.

    python -m benchmarks.tables.store
"""

from collections.abc import Callable
from itertools import count, cycle

import numpy as np

from benchmarks.harness import Row, compare, interleaved, publish, rate
from benchmarks.tables.table_filling import filled_blocks
from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import Commit, TableUpdate
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
    with _filled("sgd") as store:
        table = store.lookup({"t": np.arange(_ROWS)})["t"]
        ours, theirs = cycle(batches), cycle(batches)
        out = np.empty((_BATCH, _DIM), np.float32)

        def take() -> None:
            ids = next(theirs)
            _POOL.run(lambda start, stop: _take(table, ids[start:stop], out[start:stop]), _BATCH, 1)

        return _against("lookup, against np.take into place", "rows/s", lambda: store.lookup({"t": next(ours)}), take)


def _take(table: Float32, ids: Int64, out: Float32) -> None:
    np.take(table, ids, axis=0, out=out, mode="clip")  # other modes fill a buffer first


def _commit(optimizer: str, batches: list[Int64], gradients: Float32) -> Row:
    """Against a copy that moves as many bytes: the gradient read, weights and slots read and written."""
    updates = [TableUpdate(ids, gradients[: len(ids)]) for ids in (np.unique(batch) for batch in batches)]
    changed = len(updates[0].ids)
    length = changed * _DIM * (1 + 2 * (1 + _SLOTS[optimizer])) // 2  # a copy reads a value and writes one
    with _filled(optimizer) as store:
        versions, turns = count(1), cycle(updates)
        sources, target = cycle([np.ones(length, np.float32) for _ in range(4)]), np.empty(length, np.float32)

        def copy() -> None:
            source = next(sources)
            _POOL.run(lambda start, stop: np.copyto(target[start:stop], source[start:stop]), length, 1)

        return _against(
            f"commit, {optimizer}, against copying as many bytes",
            "rows/s",
            lambda: store.commit(Commit(next(versions), {"t": next(turns)}, 1, {})),
            copy,
            changed,
        )


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


def _against(
    name: str, unit: str, ours: Callable[[], object], theirs: Callable[[], object], amount: int = _BATCH
) -> Row:
    rounds = interleaved({"ours": rate(ours, amount), "theirs": rate(theirs, amount)}, _ROUNDS)
    return compare(name, unit, rounds["ours"], rounds["theirs"])


def _filled(optimizer: str) -> MemoryStore:
    """A store whose table "t" has all its rows."""
    store = MemoryStore()
    store.create_table(TableSpec("t", _DIM, _ROWS, optimizer=OptimizerSpec.of(optimizer, learning_rate=0.01)))
    store.put("t", filled_blocks(_ROWS, _DIM, np.ones(_SLOTS[optimizer] * _DIM, np.float32)))
    return store


if __name__ == "__main__":
    main()
