"""The cost of a write-ahead log to commits in memory and to a whole job.

Stores with and without a log take commits in turn: 15 tables of 8 values as examples/flights has them, and one table
of 64 values. The job is one epoch of examples/flights with one worker. The log's files are in the temporary folder;
fsync is `interval`.

    python -m benchmarks.storage.commit_log
"""

import json
import os
import subprocess
import sys
import tempfile
from itertools import count
from pathlib import Path

import numpy as np

from benchmarks.harness import Row, compare, interleaved, publish, versus
from benchmarks.tables.table_work import commit
from elastable.embedding_store.contract.row_data import TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.open_store import open_store
from elastable.process.heap import keep_freed_memory

_ROUNDS, _JOB_ROUNDS = 15, 3
_RECORD = bytes(1 << 16)
_FLIGHTS = Path(__file__).parents[2] / "examples" / "flights" / "model.py"


def main() -> None:
    """Measures, prints and writes `results/commit_log.json`."""
    with tempfile.TemporaryDirectory(prefix="commit-log-") as home:
        folder = Path(home)
        rows = [
            _commits(folder / "flights", "15 tables x 640 rows x 8", 15, 300_000, 8, 640, None),
            _commits(folder / "wide", "1 table x 16,384 rows x 64", 1, 262_144, 64, 16_384, None),
            _job(folder / "job"),
        ]
    publish("commit_log", "a log with fsync=interval against none, Adagrad; 64 KiB records", rows)


def _commits(folder: Path, what: str, tables: int, ids: int, dim: int, batch: int, floor: float | None) -> Row:
    random = np.random.default_rng(2026)
    batches = [[random.choice(ids, batch, replace=False) for _ in range(tables)] for _ in range(16)]
    gradients = random.standard_normal((batch, dim), dtype=np.float32)
    updates = [[TableUpdate(chosen, gradients) for chosen in of_table] for of_table in zip(*batches, strict=True)]
    adagrad = OptimizerSpec.of("adagrad", learning_rate=0.01)
    with open_store(f"memory?log={folder}&log_bytes=8GiB") as logged, open_store("memory") as plain:
        for store in (logged, plain):
            for number in range(tables):
                store.create_table(TableSpec(f"t{number:02}", dim, None, optimizer=adagrad))
        ours, theirs = (commit(store, *updates, record=_RECORD) for store in (logged, plain))
        name = f"commits of {what}, with a log vs. without"
        return versus(name, "rows/s", ours, theirs, tables * batch, _ROUNDS, floor)


def _job(folder: Path) -> Row:
    """Examples/s of flights; each round trains one epoch with a log, and one without."""
    numbers = count()

    def train(store: str) -> float:
        place = folder / str(next(numbers))
        command = ["train", str(_FLIGHTS), "--workers", "1", "--epochs", "1", "--no-export"]
        command += ["--run-dir", str(place / "runs")]
        subprocess.run(
            [sys.executable, "-m", "elastable", *command, "--store", store.format(place=place)],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        figure: float = json.loads((place / "runs" / "latest" / "result.json").read_text())["examples_per_second"]
        return figure

    contenders = {"logged": lambda: train("memory?log={place}/log"), "plain": lambda: train("memory")}
    rounds = interleaved(contenders, _JOB_ROUNDS)
    what = "flights, one worker, with a log vs. without"
    return compare(what, "examples/s", rounds["logged"], rounds["plain"], 0.9)


if __name__ == "__main__":
    keep_freed_memory()  # as every process of the `elastable` command does
    main()
