"""Updates of tables in memory, compared with memory bandwidth, NumPy, and TensorFlow's sparse updates.

Batches of 65,536 ids over 2 million rows of 64 values, on as many threads; 24
batches and several gradients take turns, so that rows come from memory rather
than a cache. TensorFlow runs in a separate process; the two take turns.

    python -m benchmarks.tables.update
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import numpy as np

from benchmarks.harness import Row, publish, versus
from benchmarks.peers import workloads
from benchmarks.peers.races import run, table_races
from benchmarks.tables.table_work import copy, fill
from elastable.embedding_store import EmbeddingTable, IndexedSlices, Indexer, MemoryStore, OptimizerSpec, TableSpec
from elastable.embedding_store.native.range_pool import RangePool
from elastable.embedding_store.optimizers.fused import FUSED
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.process.heap import keep_freed_memory

ROWS, DIM, BATCH = workloads.ROWS, workloads.DIM, workloads.BATCH
_POOL = RangePool(workloads.THREADS)
_GRADIENTS = 4
_ROUNDS = 9
_LINE = 64  # bytes of a cache line: what a slot of 4 bytes moves


def main() -> None:
    """Measures, prints and writes `results/update.json`."""
    keep_freed_memory()  # as every process of the `elastable` command does
    unique, zipf = workloads.unique(), workloads.zipf()
    rows = [_optimizer(name, unique) for name in FUSED]
    rows += [_zipf(zipf), _grouped("unique", unique), _grouped("Zipf(1.05)", zipf), *_against_tensorflow()]
    publish("update", f"Updates in memory: {BATCH:,} ids of {ROWS:,} rows x {DIM}, {_POOL.threads} threads", rows)


def _optimizer(name: str, batches: list[workloads.Int64]) -> Row:
    """Against a copy that moves as many bytes: the gradient read, weights and slots read and written."""
    with _filled(name) as table:
        width = row_optimizer(table.spec.optimizer).slot_width(DIM)
        moved = BATCH * (4 * DIM + 2 * (4 * DIM + max(4 * width, _LINE if width else 0)))
        return _against_copying(
            f"table.update, {name}, unique ids, against copying as many bytes", table, batches, moved
        )


def _zipf(batches: list[workloads.Int64]) -> Row:
    """What cannot be avoided: gradients read, rows of different ids and their accumulators read and written."""
    with _filled("rowwise_adagrad") as table:
        different = int(np.median([len(np.unique(ids)) for ids in batches]))
        moved = BATCH * (8 + 4 * DIM) + different * 2 * (4 * DIM + _LINE)
        name = "table.update, rowwise_adagrad, Zipf(1.05) ids, against copying the least bytes"
        return _against_copying(name, table, batches, moved)


def _against_copying(name: str, table: EmbeddingTable, batches: list[workloads.Int64], moved: int) -> Row:
    random = np.random.default_rng(2)
    slices = [random.standard_normal((BATCH, DIM), np.float32) for _ in range(_GRADIENTS)]
    turns, gradients = cycle(batches), cycle(slices)

    def update() -> None:
        table.update(None, IndexedSlices(next(gradients), next(turns)))

    copying = copy(moved // 8, _POOL, _GRADIENTS)  # float32: a copy reads a value and writes one
    return versus(name, "ids/s", update, copying, BATCH, _ROUNDS, at_least_s=0.1)


def _grouped(kind: str, batches: list[workloads.Int64]) -> Row:
    indexer, turns, theirs = Indexer(), cycle(batches), cycle(batches)
    return versus(
        f"Indexer.group, {kind} ids, against np.unique",
        "ids/s",
        lambda: indexer.group(next(turns)),
        lambda: np.unique(next(theirs), return_inverse=True, return_counts=True),
        BATCH,
        _ROUNDS,
        at_least_s=0.1,
    )


def _against_tensorflow() -> list[Row]:
    """The races against TensorFlow, which is installed wherever these are; other peers have `benchmarks.peers`."""
    with tempfile.TemporaryDirectory(prefix="update-") as folder:
        races = [race for race in table_races() if any(runner.name == "tensorflow" for runner in race.runners)]
        return [row for race in races for row in run(race, Path(folder))]


@contextmanager
def _filled(optimizer: str) -> Iterator[EmbeddingTable]:
    """A table of which all rows hold values of their own."""
    with MemoryStore(_POOL.threads, direct_bytes=1 << 33) as store:
        spec = TableSpec("t", DIM, ROWS, optimizer=OptimizerSpec.of(optimizer, learning_rate=0.01))
        yield fill(store, spec)


if __name__ == "__main__":
    main()
