"""Dynamic tables: lookups compared with a fixed table, commits of new ids, growth, and bytes per row.

python -m benchmarks.tables.dynamic
"""

import statistics
import time
from itertools import count, cycle

import numpy as np

from benchmarks.harness import Row, compare, interleaved, publish, versus
from benchmarks.processes import resident_bytes
from benchmarks.tables.table_work import fill, look_up
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.native.id_index import IdIndex
from elastable.embedding_store.native.range_pool import available_cores
from elastable.process.heap import keep_freed_memory

_ROWS, _DIM, _BATCH, _BATCHES = 2_000_000, 64, 65_536, 24
_GROWN = 4_000_000
_ROUNDS = 15
_THREADS = min(available_cores(), 2)
_BYTES_A_ROW = 36.0  # what there may be beyond weights and slots
_ADAGRAD = OptimizerSpec.of("adagrad")


def main() -> None:
    """Measures, prints and writes `results/dynamic.json`."""
    keep_freed_memory()  # as every process of the `elastable` command does
    random = np.random.default_rng(2026)
    ids = np.unique(random.integers(-(2**63), 2**63 - 1, _GROWN + 1000, np.int64))
    ids = random.permutation(ids)[:_GROWN]
    rows = [
        *_bytes_of_the_index(ids),
        _bytes_of_a_table(ids[:_ROWS]),
        _bytes_of_a_table(ids),
        _lookup(ids[:_ROWS], random),
    ]
    rows += [*_growth(ids), _new_rows(ids)]
    publish("dynamic", f"Tables of any int64: rows x {_DIM}, commits of {_BATCH:,} ids, {_THREADS} threads", rows)


def _bytes_row(name: str, measured: float) -> Row:
    return Row.at_most(name, measured, "bytes/row", _BYTES_A_ROW)


def _bytes_of_the_index(ids: Int64) -> list[Row]:
    """What the directory adds to the process, at the end and at the worst moment of its growth."""
    positions = np.zeros(_BATCH, np.int64)
    warmed = IdIndex()
    warmed.reserve(_BATCH)
    warmed.claim(ids[:_BATCH], positions)
    before, index, found = resident_bytes(), IdIndex(), list[float]()
    for start in range(0, len(ids), _BATCH):
        some = ids[start : start + _BATCH]
        index.reserve(len(some))
        index.claim(some, positions[: len(some)])
        if index.count >= _ROWS:
            found.append((resident_bytes() - before) / index.count)
    return [
        _bytes_row(f"index of {len(ids):,} ids, resident", found[-1]),
        _bytes_row(f"index at the worst moment from {_ROWS:,} ids to {len(ids):,}, resident", max(found)),
    ]


def _bytes_of_a_table(ids: Int64) -> Row:
    """What a whole table adds to the process, less its weights and slots."""
    gradients = np.ones((_BATCH, _DIM), np.float32)
    with MemoryStore(_THREADS) as store:
        for name in ("t", "warm"):
            store.create_table(TableSpec(name, _DIM, optimizer=_ADAGRAD))
        for version in (1, 2):  # from here on the process has what commits work with
            store.commit(Commit(version, {"warm": TableUpdate(ids[:_BATCH], gradients)}, 0, {}))
        before = resident_bytes()
        for version, start in enumerate(range(0, len(ids), _BATCH), 3):
            some = ids[start : start + _BATCH]
            store.commit(Commit(version, {"t": TableUpdate(some, gradients[: len(some)])}, 0, {}))
        beyond = (resident_bytes() - before) / len(ids) - 2 * 4 * _DIM
    return _bytes_row(f"table of {len(ids):,} rows beyond weights and slots, resident", beyond)


def _lookup(ids: Int64, random: np.random.Generator) -> Row:
    with MemoryStore(_THREADS) as store:
        batches = [random.integers(0, len(ids), _BATCH) for _ in range(_BATCHES)]
        sgd = OptimizerSpec.of("sgd")
        fixed = fill(store, TableSpec("fixed", _DIM, len(ids), optimizer=sgd))
        dynamic = fill(store, TableSpec("dynamic", _DIM, optimizer=sgd), ids)
        ours, theirs = look_up(dynamic, [ids[batch] for batch in batches], 6), look_up(fixed, batches, 6)
        return versus("lookup, against a fixed table", "rows/s", ours, theirs, _BATCH, _ROUNDS, 0.6, 0.1)


def _growth(ids: Int64) -> list[Row]:
    """Commits of new ids from none to all of them: the longest against the median, and the cells that they moved."""
    gradients = np.ones((_BATCH, _DIM), np.float32)
    seconds, claims, moved = list[float](), list[float](), list[float]()
    index = IdIndex()
    positions = np.zeros(_BATCH, np.int64)
    with MemoryStore(_THREADS) as store:
        store.create_table(TableSpec("t", _DIM, optimizer=_ADAGRAD))
        for version, start in enumerate(range(0, len(ids) - _BATCH, _BATCH), 1):
            update = TableUpdate(ids[start : start + _BATCH], gradients)
            began = time.perf_counter()
            store.commit(Commit(version, {"t": update}, 0, {}))
            seconds.append(time.perf_counter() - began)
            before = index.cells_moved
            began = time.perf_counter()
            index.reserve(_BATCH)
            index.claim(update.ids, positions)
            claims.append(time.perf_counter() - began)
            moved.append((index.cells_moved - before) / _BATCH)
    return [
        _longest(f"longest commit of new ids from 0 to {len(ids):,} rows, against the median", seconds),
        _longest("longest time that the index takes in it, against the median", claims),
        Row(
            "cells moved by growth for a new id: the most in a commit, against the mean",
            max(moved),
            "cells",
            statistics.mean(moved),
            statistics.mean(moved) / max(moved),
        ),
    ]


def _longest(name: str, seconds: list[float]) -> Row:
    median, most = 1e6 * statistics.median(seconds[1:]), 1e6 * max(seconds[1:])  # the first one loads kernels
    return Row(name, most, "us", median, median / most)


def _new_rows(ids: Int64) -> Row:
    """Commits of ids that have no row yet, against commits of ids that have one."""
    gradients = np.ones((_BATCH, _DIM), np.float32)
    blocks = [ids[start : start + _BATCH] for start in range(0, len(ids) - _BATCH, _BATCH)]
    with MemoryStore(_THREADS) as store:
        for name in ("new", "known"):
            store.create_table(TableSpec(name, _DIM, optimizer=_ADAGRAD))
        versions, coming, known = count(1), iter(blocks), cycle(blocks[:_BATCHES])
        for block in blocks[:_BATCHES]:
            store.commit(Commit(next(versions), {"known": TableUpdate(block, gradients)}, 0, {}))

        def commit(name: str, block: Int64) -> float:
            began = time.perf_counter()
            store.commit(Commit(next(versions), {name: TableUpdate(block, gradients)}, 0, {}))
            return _BATCH / (time.perf_counter() - began)

        figures = interleaved(
            {"new": lambda: commit("new", next(coming)), "known": lambda: commit("known", next(known))}, len(blocks)
        )
        return compare("commits of new ids, Adagrad, against known ids", "rows/s", figures["new"], figures["known"])


if __name__ == "__main__":
    main()
