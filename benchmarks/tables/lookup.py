"""Lookups of tables in memory, compared with memory bandwidth and NumPy, on as many threads.

Batches of 65,536 uniform ids over 2 million rows of 64 values; 24 batches and
several outputs take turns, so that rows come from memory rather than a cache.

    python -m benchmarks.tables.lookup
"""

import subprocess
import sys
import tempfile
from itertools import cycle

import numpy as np

from benchmarks.harness import Row, Work, compare, publish, rates, versus
from benchmarks.memory_pace import reading
from benchmarks.peers import workloads
from benchmarks.tables.table_work import copy, fill, look_up, take
from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.native.range_pool import RangePool, available_cores
from elastable.embedding_store.tables.many_tables import lookup_many
from elastable.embedding_store.tables.table import EmbeddingTable
from elastable.process.heap import keep_freed_memory

ROWS, DIM, BATCH, BAG = workloads.ROWS, workloads.DIM, workloads.BATCH, workloads.BAG
_BATCHES, _OUTPUTS, _TABLES = 24, 6, 8
_ROUNDS = 15
_POOL = RangePool(min(available_cores(), 2))
_SGD = OptimizerSpec.of("sgd")


def main() -> None:
    """Measures, prints and writes `results/lookup.json`."""
    keep_freed_memory()  # as every process of the `elastable` command does
    rows = [_first_lookups()]
    with MemoryStore(_POOL.threads) as store:
        table = fill(store, TableSpec("fixed", DIM, ROWS, optimizer=_SGD))
        batches = workloads.uniform()
        rows += [*_fixed(table, batches), _bags(table, workloads.bags())]
        ids, batches_of_any = workloads.dynamic_ids()
        dynamic = fill(store, TableSpec("dynamic", DIM, optimizer=_SGD), ids)
        ours = look_up(dynamic, batches_of_any, _OUTPUTS)
        rows.append(_row("dynamic table, against a fixed one", "rows/s", ours, look_up(table, batches, _OUTPUTS), 0.6))
    rows.append(_many(np.random.default_rng(2026)))
    publish("lookup", f"Lookups in memory: {BATCH:,} ids of {ROWS:,} rows x {DIM}, {_POOL.threads} threads", rows)


def _fixed(table: EmbeddingTable, batches: list[Int64]) -> list[Row]:
    whole = table.lookup(np.arange(ROWS))
    contenders = {
        "ours": look_up(table, batches, _OUTPUTS),
        "memcpy": copy(BATCH * DIM, _POOL, _OUTPUTS, _OUTPUTS),
        "take": take(whole, batches, _POOL, _OUTPUTS),
        "new": _into_new_memory(table, batches),
    }
    figures = rates(contenders, BATCH, _ROUNDS, 0.1)
    return [
        compare("fixed table, against copying as many bytes", "rows/s", figures["ours"], figures["memcpy"], 0.85),
        compare("fixed table, against np.take into place", "rows/s", figures["ours"], figures["take"]),
        compare("fixed table, into new memory", "rows/s", figures["new"], figures["memcpy"]),
    ]


def _bags(table: EmbeddingTable, bags: list[Int64]) -> Row:
    ids = BATCH // BAG * BAG
    parts = [np.ones(ids * DIM, np.float32).view(np.uint64) for _ in range(4 * _OUTPUTS)]
    read = reading(cycle(parts), _POOL)
    name = f"bags of {BAG}, sum, against reading as many bytes in a row"
    return _row(name, "ids/s", look_up(table, bags, _OUTPUTS, "sum"), read, amount=ids)


def _many(random: np.random.Generator) -> Row:
    """Tables of a DLRM: side by side in one buffer, against one lookup after the other and a concatenation."""
    size, many = ROWS // _TABLES, BATCH // _TABLES
    with MemoryStore(_POOL.threads) as store:
        tables = [fill(store, TableSpec(f"t{k}", DIM, size, optimizer=_SGD)) for k in range(_TABLES)]
        batches = [[random.integers(0, size, many) for _ in tables] for _ in range(_BATCHES)]
        ours, theirs = cycle(batches), cycle(batches)
        outputs = cycle([np.ones((many, DIM * (_TABLES + 1)), np.float32) for _ in range(_OUTPUTS)])
        first = np.zeros((many, DIM), np.float32)

        def joined() -> Float32:
            return np.concatenate([first, *lookup_many(tables, next(theirs), "sequential")], axis=1)

        def in_place() -> None:
            lookup_many(tables, next(ours), "preallocated", next(outputs), prepend_columns=DIM)

        return _row(f"{_TABLES} tables in one buffer, against looked up and joined", "rows/s", in_place, joined)


def _first_lookups() -> Row:
    """What the first lookups of a process wait for: kernels from numba's cache, against compiling them."""
    program = "from elastable.embedding_store.warm import warm_lookups; print(warm_lookups())"
    with tempfile.TemporaryDirectory() as folder:

        def seconds() -> float:
            command = [sys.executable, "-c", f"import os; os.environ['NUMBA_CACHE_DIR'] = {folder!r}; {program}"]
            return float(subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout)

        compiled, cached = seconds(), sorted(seconds() for _ in range(3))[1]
    return Row("first lookups: kernels from the cache, against compiled", cached, "s", compiled, compiled / cached)


def _row(name: str, unit: str, ours: Work, theirs: Work, floor: float | None = None, amount: int = BATCH) -> Row:
    return versus(name, unit, ours, theirs, amount, _ROUNDS, floor, 0.1)


def _into_new_memory(table: EmbeddingTable, batches: list[Int64]) -> Work:
    turns, kept = cycle(batches), [np.empty(0, np.float32)] * _OUTPUTS

    def work() -> None:
        kept.append(table.lookup(next(turns)))
        del kept[0]

    return work


if __name__ == "__main__":
    main()
