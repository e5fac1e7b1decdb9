"""Lookups of tables in memory, compared with memory bandwidth and NumPy, on as many threads.

Batches of 65,536 uniform ids over 2 million rows of 64 values; 24 batches and
several outputs take turns, so that rows come from memory rather than a cache.

    python -m benchmarks.tables.lookup
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle

import numpy as np

from benchmarks.harness import Row, compare, interleaved, publish, rate
from benchmarks.memory_pace import reading
from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.native.range_pool import RangePool, available_cores
from elastable.embedding_store.tables.many_tables import lookup_many
from elastable.embedding_store.tables.table import EmbeddingTable
from elastable.process.heap import keep_freed_memory

ROWS, DIM, BATCH, BAG = 2_000_000, 64, 65_536, 20
_BATCHES, _OUTPUTS, _TABLES = 24, 6, 8
_ROUNDS = 15
_POOL = RangePool(min(available_cores(), 2))

Work = Callable[[], object]


def filled_table(store: MemoryStore, ids: Int64, dynamic: bool = False) -> EmbeddingTable:
    """A table of rows x `DIM`, in which every one of `ids` holds a value of its own.

    Args:
        store: Where it is made.
        ids: int64 `[n]`, each once; of a fixed table `0..n` in any order.
        dynamic: Whether any int64 is an id of it.
    """
    name, size = ("dynamic", None) if dynamic else ("fixed", len(ids))
    table = store.table(TableSpec(name, DIM, size, optimizer=OptimizerSpec.of("sgd")))
    table.put(_blocks(ids))
    return table


def look_up(table: EmbeddingTable, batches: list[Int64], combiner: str | None = None) -> Work:
    """One lookup a call, of the next batch into the next of several outputs.

    Args:
        table: Any.
        batches: int64 `[n]` each; with a combiner `[n, bag]`.
        combiner: As of `EmbeddingTable.lookup`.
    """
    turns = cycle(batches)
    outputs = cycle([np.ones((len(batches[0]), table.dim), np.float32) for _ in range(_OUTPUTS)])
    return lambda: table.lookup(next(turns), next(outputs), combiner=combiner)


def main() -> None:
    """Measures, prints and writes `results/lookup.json`."""
    keep_freed_memory()  # as every process of the `elastable` command does
    random = np.random.default_rng(2026)
    rows = [_first_lookups()]
    with _store() as store:
        table = filled_table(store, np.arange(ROWS))
        batches = [random.integers(0, ROWS, BATCH) for _ in range(_BATCHES)]
        bags = [random.integers(0, ROWS, (BATCH // BAG, BAG)) for _ in range(_BATCHES)]
        rows += [*_fixed(table, batches), _bags(table, bags)]
        ids = np.unique(random.integers(-(2**63), 2**63 - 1, ROWS + 1000, np.int64))
        ids = random.permutation(ids)[:ROWS]
        dynamic = filled_table(store, ids, dynamic=True)
        pair = {"ours": look_up(dynamic, [ids[batch] for batch in batches]), "theirs": look_up(table, batches)}
        rows.append(_row("dynamic table, against a fixed one", "rows/s", pair, BATCH, 0.6))
    rows.append(_many(random))
    publish("lookup", f"Lookups in memory: {BATCH:,} ids of {ROWS:,} rows x {DIM}, {_POOL.threads} threads", rows)


def _fixed(table: EmbeddingTable, batches: list[Int64]) -> list[Row]:
    whole = table.lookup(np.arange(ROWS))
    contenders = {
        "ours": look_up(table, batches),
        "memcpy": _copy((BATCH, DIM)),
        "take": _take(whole, batches),
        "new": _into_new_memory(table, batches),
    }
    figures = interleaved({name: rate(work, BATCH, 0.1) for name, work in contenders.items()}, _ROUNDS)
    return [
        compare("fixed table, against copying as many bytes", "rows/s", figures["ours"], figures["memcpy"], 0.85),
        compare("fixed table, against np.take into place", "rows/s", figures["ours"], figures["take"]),
        compare("fixed table, into new memory", "rows/s", figures["new"], figures["memcpy"]),
    ]


def _bags(table: EmbeddingTable, bags: list[Int64]) -> Row:
    pair = {"ours": look_up(table, bags, "sum"), "theirs": _read((BATCH // BAG * BAG, DIM))}
    return _row(f"bags of {BAG}, sum, against reading as many bytes in a row", "ids/s", pair, BATCH // BAG * BAG)


def _many(random: np.random.Generator) -> Row:
    """Tables of a DLRM: side by side in one buffer, against one lookup after the other and a concatenation."""
    size, many = ROWS // _TABLES, BATCH // _TABLES
    with _store() as store:
        tables = [store.table(TableSpec(f"t{k}", DIM, size, optimizer=OptimizerSpec.of("sgd"))) for k in range(_TABLES)]
        for table in tables:
            table.put(_blocks(np.arange(size)))
        batches = [[random.integers(0, size, many) for _ in tables] for _ in range(_BATCHES)]
        ours, theirs = cycle(batches), cycle(batches)
        outputs = cycle([np.ones((many, DIM * (_TABLES + 1)), np.float32) for _ in range(_OUTPUTS)])
        first = np.zeros((many, DIM), np.float32)

        def joined() -> Float32:
            return np.concatenate([first, *lookup_many(tables, next(theirs), "sequential")], axis=1)

        pair: dict[str, Work] = {
            "ours": lambda: lookup_many(tables, next(ours), "preallocated", next(outputs), prepend_columns=DIM),
            "theirs": joined,
        }
        return _row(f"{_TABLES} tables in one buffer, against looked up and joined", "rows/s", pair, BATCH)


def _first_lookups() -> Row:
    """What the first lookups of a process wait for: kernels from numba's cache, against compiling them."""
    program = "from elastable.embedding_store.warm import warm_lookups; print(warm_lookups())"
    with tempfile.TemporaryDirectory() as folder:

        def seconds() -> float:
            command = [sys.executable, "-c", f"import os; os.environ['NUMBA_CACHE_DIR'] = {folder!r}; {program}"]
            return float(subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout)

        compiled, cached = seconds(), sorted(seconds() for _ in range(3))[1]
    return Row("first lookups: kernels from the cache, against compiled", cached, "s", compiled, compiled / cached)


def _row(name: str, unit: str, pair: dict[str, Work], amount: int, floor: float | None = None) -> Row:
    figures = interleaved({side: rate(work, amount, 0.1) for side, work in pair.items()}, _ROUNDS)
    return compare(name, unit, figures["ours"], figures["theirs"], floor)


def _into_new_memory(table: EmbeddingTable, batches: list[Int64]) -> Work:
    turns, kept = cycle(batches), [np.empty(0, np.float32)] * _OUTPUTS

    def work() -> None:
        kept.append(table.lookup(next(turns)))
        del kept[0]

    return work


def _copy(shape: tuple[int, int]) -> Work:
    sources, targets = (cycle([np.ones(shape, np.float32) for _ in range(_OUTPUTS)]) for _ in range(2))

    def work() -> None:
        source, target = next(sources), next(targets)
        _POOL.run(lambda start, stop: np.copyto(target[start:stop], source[start:stop]), len(source), 1)

    return work


def _take(rows: Float32, batches: list[Int64]) -> Work:
    turns = cycle(batches)
    outputs = cycle([np.ones((BATCH, DIM), np.float32) for _ in range(_OUTPUTS)])

    def work() -> None:
        ids, out = next(turns), next(outputs)

        def take(start: int, stop: int) -> None:
            np.take(rows, ids[start:stop], axis=0, out=out[start:stop], mode="clip")  # other modes fill a buffer first

        _POOL.run(take, BATCH, 1)

    return work


def _read(shape: tuple[int, int]) -> Work:
    sources = [np.ones(shape, np.float32).reshape(-1).view(np.uint64) for _ in range(4 * _OUTPUTS)]
    return reading(cycle(sources), _POOL)


@contextmanager
def _store() -> Iterator[MemoryStore]:
    with MemoryStore(_POOL.threads) as store:
        yield store


def _blocks(ids: Int64) -> Iterator[RowBlock]:
    for start in range(0, len(ids), 1 << 16):
        block = ids[start : start + (1 << 16)]
        yield RowBlock(block, np.ones((len(block), DIM), np.float32), np.empty((len(block), 0), np.float32))


if __name__ == "__main__":
    main()
