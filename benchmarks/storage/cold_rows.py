"""What a row that is not hot costs in memory of the process: in files and in Redis.

Three million rows of a dynamic table, ids drawn at random, 16 values with Adagrad's slots, and a budget of 64 MiB. For
each tier a process opens the store that another one has filled, and then looks rows up and commits, 50 batches of 4,096
uniform ids of which one in eight is new. Memory is the process's own (`RssAnon`): without the mapped files, and without
the server.

    python -m benchmarks.storage.cold_rows [ROWS]
"""

import json
import sys
import tempfile
import time

import numpy as np

from benchmarks.harness import Row, publish
from benchmarks.processes import output_of, own_memory, redis_server
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.open_store import open_store

_ROWS, _DIM, _BATCH, _BATCHES = 3_000_000, 16, 4_096, 50
_BUDGET = 64 << 20
_PROGRAM = "benchmarks.storage.cold_rows"
_SPEC = TableSpec("people", _DIM, optimizer=OptimizerSpec.of("adagrad"))


def main(rows: int) -> None:
    """Measures, prints and writes `results/cold_rows.json`."""
    found: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="cold-rows-") as home, redis_server() as server:
        options = f"budget={_BUDGET}&deadline=60"
        places = {"files": f"file://{home}/rows?budget={_BUDGET}", "Redis": f"{server.url}?{options}"}
        for name, url in places.items():
            output_of(_PROGRAM, "fill", url, str(rows))
            measured = json.loads(output_of(_PROGRAM, "measure", url, str(rows)))
            found += [
                Row(f"{name}: memory of a cold row", measured["cold"], "bytes"),
                Row(f"{name}: rows looked up and updated", measured["rate"], "rows/s"),
                Row(f"{name}: memory above the budget after that, a row", measured["used"], "bytes"),
            ]
    publish("cold_rows", f"{rows:,} rows x {_DIM} with slots, a budget of {_BUDGET >> 20} MiB", found)


def _ids(numbers: Int64) -> Int64:
    """Different ids, one for each number from 0 on, that are strewn over all of int64."""
    ids: Int64 = (numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
    return ids


def _fill(url: str, rows: int) -> dict[str, float]:
    random = np.random.default_rng(1)
    with open_store(f"{url}&log=none") as store:
        store.create_table(_SPEC)
        for first in range(0, rows, 50_000):
            ids = _ids(np.arange(first, min(first + 50_000, rows)))
            values = random.normal(size=(2, len(ids), _DIM)).astype(np.float32)
            store.put(_SPEC.name, [RowBlock(ids, values[0], np.abs(values[1]))])
    return {}


def _measure(url: str, rows: int) -> dict[str, float]:
    with open_store("memory") as small:  # kernels are loaded by it, and are not counted
        _train(small, np.random.default_rng(2), 1_000, 4)
    begun = own_memory()
    with open_store(f"{url}&log=none") as store:
        assert store.row_count(_SPEC.name) == rows
        opened = own_memory()
        start = time.perf_counter()
        _train(store, np.random.default_rng(3), rows, _BATCHES)
        seconds = time.perf_counter() - start
        used = own_memory()
    return {
        "cold": (opened - begun) / rows,
        "rate": _BATCH * _BATCHES / seconds,
        "used": (used - begun - _BUDGET) / rows,
    }


def _train(store: EmbeddingStore, random: np.random.Generator, rows: int, batches: int) -> None:
    store.create_table(_SPEC)
    for _ in range(batches):
        ids = _ids(np.unique(random.integers(0, rows * 8 // 7, _BATCH)))
        store.lookup({_SPEC.name: ids})
        version = store.version()
        updates = {_SPEC.name: TableUpdate(ids, np.ones((len(ids), _DIM), np.float32))}
        store.commit(Commit(version + 1, updates, version, {}))


if __name__ == "__main__":
    if len(sys.argv) == 4:
        job = {"fill": _fill, "measure": _measure}[sys.argv[1]]
        print(json.dumps(job(sys.argv[2], int(sys.argv[3]))))
    else:
        main(int(sys.argv[1]) if len(sys.argv) == 2 else _ROWS)
