"""What store servers take off the master: its bytes, its processor time, and what that costs all processes together.

The click model (Adagrad, one table of a million rows, uniform ids, one worker) with its rows at the master, at one
store server and at four, with versions of 2,048 examples and of 32,768: what a version costs each process besides its
rows does not grow with them. All jobs take turns. Bytes are counted at TCP connections, and so every process talks
over gRPC, as on separate hosts; examples/s and processor time are also measured through shared memory, as on one host.

    python -m benchmarks.jobs.offload [EXAMPLES ...]
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.click_job.contender import ready
from benchmarks.click_job.contenders import Job, click_job
from benchmarks.click_job.draws import batches
from benchmarks.click_job.sizes import BATCH, DIM, FEATURES, HIDDEN
from benchmarks.harness import Row, compare, interleaved, publish
from benchmarks.processes import moved_bytes, processor_s

_ROWS = 1_000_000
_SECONDS = {BATCH: 3.0, 16 * BATCH: 8.0}
"""Examples of a version -> seconds of a turn."""

_ROUNDS = 7
_SETTLE_S = 0.5
_MOST_OF_MASTER, _LEAST_PACE, _MOST_PROCESSOR = 0.05, 0.95, 1.15


@dataclass(slots=True)
class _Turns:
    """A job, and what its turns have shown, a version each.

    Attributes:
        job: The job.
        seconds: Of a turn.
        master_us, all_us: Microseconds of processor time of the master, and of all processes.
        bytes: Through the connections of the master.
    """

    job: Job
    seconds: float
    master_us: list[float] = field(default_factory=list)
    all_us: list[float] = field(default_factory=list)
    bytes: list[float] = field(default_factory=list)

    def turn(self) -> float:
        """Examples/s of a turn."""
        pids = [process.pid for process in self.job.processes]
        master = pids[self.job.stores]
        with self.job.running():
            time.sleep(_SETTLE_S)
            version, began = self.job.version(), time.perf_counter()
            used, all_used, moved = processor_s([master]), processor_s(pids), moved_bytes(master)
            time.sleep(self.seconds)
            moved, all_used, used = (
                moved_bytes(master) - moved,
                processor_s(pids) - all_used,
                processor_s([master]) - used,
            )
            versions, took = self.job.version() - version, time.perf_counter() - began
        self.master_us.append(1e6 * used / versions)
        self.all_us.append(1e6 * all_used / versions)
        self.bytes.append(moved / versions)
        return versions * self.job.examples / took


def main(arguments: Sequence[str]) -> None:
    """Measures versions of so many examples, all sizes by default; prints and writes `results/offload.json`."""
    sizes = [int(argument) for argument in arguments] or list(_SECONDS)
    rows = [row for size in sizes for transport in ("grpc", "auto") for row in _run(size, transport)]
    publish("offload", "What store servers take off the master", rows)


def _run(examples: int, transport: str) -> list[Row]:
    seconds = _SECONDS[examples]
    with tempfile.TemporaryDirectory(prefix="offload-") as home:
        jobs = []
        for n in (0, 1, 4):
            job = click_job(
                f"{n}", _ROWS, "Adagrad", Path(home), threads=1, stores=n, transport=transport, batch=examples
            )
            jobs.append(_Turns(job, seconds))
        with ready(*(each.job for each in jobs)):
            paces = list(interleaved({each.job.name: each.turn for each in jobs}, _ROUNDS).values())
    return _rows(examples, transport == "grpc", jobs, paces)


def _rows(examples: int, grpc: bool, jobs: Sequence[_Turns], paces: Sequence[Sequence[float]]) -> list[Row]:
    embedded, one, four = jobs
    size = f"versions of {examples:,}"
    name = f"{size}, {'over gRPC' if grpc else 'through shared memory'}"
    ids = batches(_ROWS, batch=examples)[0]
    of_rows = 1e6 / float(np.mean([len(np.unique(batch)) for batch in ids]))
    most = round(1 / _MOST_OF_MASTER, 4)
    rows = []
    if grpc:
        dense = 2 * 4 * _dense_values()
        for what, besides in (
            ("bytes through the master, a version, 4 store servers", 0),
            ("the same without those of dense variables and their gradients", dense),
        ):
            ours, theirs = ([sent - besides for sent in job.bytes] for job in (four, embedded))
            rows.append(compare(f"{size}, {what}", "bytes", ours, theirs, most, less=True))
    ours, theirs = ([of_rows * each for each in job.master_us] for job in (four, embedded))
    share = round(1 / _MOST_PROCESSOR, 4)
    spent = f"{name}, processor time of a version"
    return [
        *rows,
        compare(f"{name}, the master's processor time of a million rows, 4 store servers", "us", ours, theirs, most),
        compare(f"{name}, 1 store server against none", "examples/s", paces[1], paces[0], _LEAST_PACE),
        compare(f"{spent}, 1 store server against none", "us", one.all_us, embedded.all_us),
        compare(f"{spent}, 4 store servers against 1", "us", four.all_us, one.all_us, share),
    ]


def _dense_values() -> int:
    widths = (FEATURES * DIM, *HIDDEN, 1)
    return sum(before * after + after for before, after in pairwise(widths))


if __name__ == "__main__":
    main(sys.argv[1:])
