"""Checkpoints written and restored, compared with copying the same bytes to and from the same disk.

A table of 10 million rows of 16 values with Adagrad, in memory. Both sides fsync
their files and read them after the page cache was dropped. An increment
holds the rows that 100 commits of 1,000 random ids each changed.

    python -m benchmarks.storage.checkpoints
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.harness import Row, compare, interleaved, publish
from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.native.range_pool import available_cores
from elastable.master.api import JobSpec
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.checkpoints.restoring import restore_tables
from elastable.master.checkpoints.series import CheckpointSeries
from elastable.master.checkpoints.writing import write_checkpoint
from elastable.master.tasks.progress import Progress
from elastable.process.heap import keep_freed_memory

_ROWS, _DIM, _BLOCK = 10_000_000, 16, 1 << 16
_COMMITS, _CHANGED = 100, 1000
_ROUNDS = 5
_PIECE = 16 << 20
_FLOOR = 0.7  # of the disk's own pace
_JOB = JobSpec(job="benchmark")


def main() -> None:
    """Measures, prints and writes `results/checkpoints.json`."""
    keep_freed_memory()
    rows = []
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=os.environ.get("ELASTABLE_BENCH_DIR")) as home:
        for kind, size in (("fixed", _ROWS), ("dynamic", None)):
            with _filled(size) as store:
                rows += _measured(Path(home) / kind, kind, store)
    publish("checkpoints", f"{_ROWS:,} rows x {_DIM}, Adagrad, {available_cores()} cores", rows)


def _measured(home: Path, kind: str, store: MemoryStore) -> list[Row]:
    saved = Path(write_checkpoint(home, store, {}, _JOB, Progress(0)))
    rounds = interleaved(
        {
            "write": partial(_write, home / "again", store),
            "copy to": partial(_copy, saved, home / "copy"),
            "restore": partial(_restore, saved),
            "copy from": partial(_read, saved),
        },
        _ROUNDS,
    )
    in_rows = {name: [_ROWS / seconds for seconds in times] for name, times in rounds.items()}
    seconds = statistics.median(rounds["restore"])
    rows = [
        compare(f"write, {kind} ids, against a copy", "rows/s", in_rows["write"], in_rows["copy to"], _FLOOR),
        compare(f"restore, {kind} ids, against a read", "rows/s", in_rows["restore"], in_rows["copy from"], _FLOOR),
        Row(f"recovery of a table of {kind} ids, seconds", seconds, "s"),
        Row(f"recovery, {kind} ids, of a row", seconds / _ROWS * 1e6, "us"),
    ]
    full, increment = _increments(home / "series", store)
    name = f"increment of {_COMMITS * _CHANGED:,} changes, {kind} ids, against a full one"
    return [*rows, compare(name, "us", increment, full)]


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _write(home: Path, store: MemoryStore) -> float:
    return _timed(lambda: write_checkpoint(home, store, {}, _JOB, Progress(store.version()), keep=1))


def _restore(saved: Path) -> float:
    _forget(saved)
    with MemoryStore() as store:
        return _timed(lambda: restore_tables(open_checkpoint(saved), store))


def _copy(saved: Path, to: Path) -> float:
    """Seconds to write files of the same bytes, which are in memory."""
    contents = [file.read_bytes() for file in sorted(saved.iterdir())]
    to.mkdir(exist_ok=True)

    def copy() -> None:
        for number, content in enumerate(contents):
            with (to / str(number)).open("wb", buffering=0) as file:
                for start in range(0, len(content), _PIECE):
                    file.write(memoryview(content)[start : start + _PIECE])
                os.fsync(file.fileno())

    try:
        return _timed(copy)
    finally:
        for file in to.iterdir():
            file.unlink()


def _read(saved: Path) -> float:
    _forget(saved)
    return _timed(lambda: [file.read_bytes() for file in sorted(saved.iterdir())])


def _forget(saved: Path) -> None:
    """Takes the files out of the system's memory, so that they come from the disk again."""
    for file in saved.iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _increments(home: Path, store: MemoryStore) -> tuple[list[float], list[float]]:
    """Microseconds of full checkpoints and of increments, in turn."""
    random = np.random.default_rng(1)
    gradients = np.ones((_CHANGED, _DIM), np.float32)
    full, increment = list[float](), list[float]()
    series = CheckpointSeries(home, store, keep=1, full_every=2)
    for turn in range(2 * _ROUNDS):
        for _ in range(_COMMITS):
            ids = np.unique(random.integers(0, _ROWS, _CHANGED))
            updates = {"t": TableUpdate(ids, gradients[: len(ids)])}
            store.commit(Commit(store.version() + 1, updates, store.version(), {}))
            series.committed(updates)
        write = series.begin(store, {}, _JOB, Progress(store.version()))
        (increment if turn % 2 else full).append(1e6 * _timed(write))
    return full, increment


def _filled(vocabulary_size: int | None) -> MemoryStore:
    store = MemoryStore()
    store.create_table(TableSpec("t", _DIM, vocabulary_size, optimizer=OptimizerSpec.of("adagrad")))
    store.put("t", _blocks())
    return store


def _blocks() -> Iterator[RowBlock]:
    weights = np.random.default_rng(0).standard_normal((_BLOCK, _DIM), dtype=np.float32)
    for start in range(0, _ROWS, _BLOCK):
        ids = np.arange(start, min(start + _BLOCK, _ROWS))
        yield RowBlock(ids, weights[: len(ids)], weights[: len(ids)] ** 2)


if __name__ == "__main__":
    main()
