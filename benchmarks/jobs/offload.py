"""What store servers take off the master: its bytes, its processor time, and what that costs all processes together.

The click model (Adagrad, one table of a million rows, uniform ids, one worker) with its rows at the master, at one
store server and at four, with versions of 2,048 examples and of 32,768: what a version costs each process besides its
rows does not grow with them. All jobs take turns. Bytes are counted at TCP connections, and so every process talks
over gRPC, as on separate hosts; examples/s and processor time are also measured through shared memory, as on one host.

    python -m benchmarks.jobs.offload [EXAMPLES ...]
"""

import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

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
        stores: Its store servers.
        seconds: Of a turn.
        master_us, all_us: Microseconds of processor time of the master, and of all processes.
        bytes: Through the connections of the master.
    """

    job: Job
    stores: int
    seconds: float
    master_us: list[float] = field(default_factory=list)
    all_us: list[float] = field(default_factory=list)
    bytes: list[float] = field(default_factory=list)

    def turn(self) -> float:
        """Examples/s of a turn."""
        pids = [process.pid for process in self.job.processes]
        master = pids[self.stores]
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
    # Ended from outside, too: jobs without a turn are stopped, and would stay so for ever.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    rows = [row for size in sizes for transport in ("grpc", "auto") for row in _run(size, transport)]
    publish("offload", "What store servers take off the master", rows)


def _run(examples: int, transport: str) -> list[Row]:
    seconds = _SECONDS[examples]
    with ExitStack() as held:
        home = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="offload-")))
        jobs = [
            _Turns(
                held.enter_context(
                    click_job(f"{n}", _ROWS, "Adagrad", home, threads=1, stores=n, transport=transport, batch=examples)
                ),
                n,
                seconds,
            )
            for n in (0, 1, 4)
        ]
        for each in jobs:
            each.job.start()
        for each in jobs:
            each.job.warm_up()
        paces = list(interleaved({f"{each.stores}": each.turn for each in jobs}, _ROUNDS).values())
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
        rows += [
            _less(
                f"{size}, bytes through the master, a version, 4 store servers", "bytes",
                four.bytes, embedded.bytes, most,
            ),
            _less(
                f"{size}, the same without those of dense variables and their gradients", "bytes",
                [each - dense for each in four.bytes], [each - dense for each in embedded.bytes], most,
            ),
        ]  # fmt: skip
    rows.append(
        compare(
            f"{name}, the master's processor time of a million rows, 4 store servers", "us",
            [of_rows * each for each in four.master_us], [of_rows * each for each in embedded.master_us], most,
        )
    )  # fmt: skip
    rows.append(compare(f"{name}, 1 store server against none", "examples/s", paces[1], paces[0], _LEAST_PACE))
    rows.append(
        compare(f"{name}, processor time of a version, 1 store server against none", "us", one.all_us, embedded.all_us)
    )
    share = round(1 / _MOST_PROCESSOR, 4)
    rows.append(
        compare(f"{name}, processor time of a version, 4 store servers against 1", "us", four.all_us, one.all_us, share)
    )
    return rows


def _less(name: str, unit: str, ours: Sequence[float], theirs: Sequence[float], floor: float) -> Row:
    """As `compare`, of what is the better the less there is."""
    ratio = statistics.median(other / own for own, other in zip(ours, theirs, strict=True))
    return Row(name, statistics.median(ours), unit, statistics.median(theirs), ratio, floor)


def _dense_values() -> int:
    widths = (FEATURES * DIM, *HIDDEN, 1)
    return sum(before * after + after for before, after in pairwise(widths))


if __name__ == "__main__":
    main(sys.argv[1:])
