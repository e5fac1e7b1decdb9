"""One master and up to 1,000 workers: pushes a second, its CPU time and its memory.

Workers are stubs (`benchmarks.calls.stub_workers`) in processes of their own; so is the master.

    python -m benchmarks.calls.sessions
"""

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from benchmarks.calls.stub_workers import DIM, ROWS, TABLE
from benchmarks.harness import Row, compare, interleaved, publish
from benchmarks.processes import child, line_of, resident_bytes
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.service.store_service import store_service
from elastable.master.api import JobSpec
from elastable.master.commits.dense_part import DensePart
from elastable.master.core.job_master import Master
from elastable.master.rpc.master_service import master_service
from elastable.process.heap import keep_collections_short

STILL = "still"
"""A table that nobody trains."""

_PROCESSES = 4
_GRADS_TO_WAIT = 8
_COUNTS = (8, 200, 1_000)
_ROUNDS = 3
_WARM_UP_S = 3.0
_MEASURED_S = 8.0


@dataclass(frozen=True, slots=True)
class Pace:
    """What a master did in a while.

    Attributes:
        pushes_per_s: Gradients that it took.
        cpu_ms_per_push: Of its process.
        cpu_ms_per_s: The same, by the clock.
        rss_bytes: Its memory.
        threads: Its threads.
    """

    pushes_per_s: float
    cpu_ms_per_push: float
    cpu_ms_per_s: float
    rss_bytes: int
    threads: int


class Served:
    """A master in a separate process, and what it says of itself."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = line_of(process)

    def mark(self) -> dict[str, float]:
        """Its pushes, CPU seconds, bytes of memory and threads, until now."""
        print("mark", file=self._process.stdin, flush=True)
        said: dict[str, float] = json.loads(line_of(self._process))
        return said


def pace(served: Served, seconds: float) -> Pace:
    """How a master does from now on."""
    before = served.mark()
    time.sleep(seconds)
    after = served.mark()
    took, cpu = after["at"] - before["at"], after["cpu_s"] - before["cpu_s"]
    pushes = after["pushes"] - before["pushes"]
    return Pace(
        pushes / took,
        1e3 * cpu / pushes if pushes else float("nan"),
        1e3 * cpu / took,
        int(after["rss"]),
        int(after["threads"]),
    )


@contextmanager
def serving(grads_to_wait: int, runs: bool = True) -> Iterator[Served]:
    """A master in a separate process; without `runs` it makes no version."""
    with child("benchmarks.calls.sessions", "serve", str(grads_to_wait), str(int(runs))) as process:
        yield Served(process)


@contextmanager
def stub_workers(address: str, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """So many workers, all of which have joined, in a few processes."""
    each = [count // _PROCESSES + (number < count % _PROCESSES) for number in range(_PROCESSES)]
    with ExitStack() as held:
        started = [
            held.enter_context(child("benchmarks.calls.stub_workers", address, str(some), str(sum(each[:number]))))
            for number, some in enumerate(each)
            if some
        ]
        for process in started:
            assert line_of(process) == "joined"
        yield started


def _serve(grads_to_wait: int, runs: bool) -> None:
    job = JobSpec(
        job="stubs", micro_batch_size=1, train_records=100_000_000, grads_to_wait=grads_to_wait, average="records",
        shuffle=False,
    )  # fmt: skip
    with MemoryStore() as store:
        store.create_table(TableSpec(TABLE, DIM, ROWS))
        store.create_table(TableSpec(STILL, DIM, ROWS))
        master = Master(job, store, DensePart())
        keep_collections_short()
        with GrpcServer("127.0.0.1:0", [store_service(store), master_service(master)]) as server:
            if runs:
                threading.Thread(target=master.run, daemon=True).start()
            print(server.address, flush=True)
            for _ in sys.stdin:
                used = resource.getrusage(resource.RUSAGE_SELF)
                said = {
                    "pushes": store.version() * grads_to_wait,
                    "cpu_s": used.ru_utime + used.ru_stime,
                    "at": time.monotonic(),
                    "rss": resident_bytes(),
                    "threads": len(os.listdir("/proc/self/task")),
                }
                print(json.dumps(said), flush=True)


def main() -> None:
    """Measures, prints and writes `results/sessions.json`."""
    paces = interleaved({f"{count:,}": partial(_pace_of, count) for count in _COUNTS}, _ROUNDS)
    few, *_ = paces.values()
    rows: list[Row] = []
    for count, measured in paces.items():
        floors = (None, None) if measured is few else (0.8, 1 / 1.5)
        pushes = [[each.pushes_per_s for each in some] for some in (measured, few)]
        rows.append(compare(f"pushes of {count} workers", "pushes/s", pushes[0], pushes[1], floors[0]))
        cpu = [[1e3 * each.cpu_ms_per_push for each in some] for some in (measured, few)]
        rows.append(compare(f"the master's CPU time for a push of {count} workers", "us", cpu[0], cpu[1], floors[1]))
    publish("sessions", "One master and up to 1,000 workers", [*rows, *_idle_rows()])


def _pace_of(count: int) -> Pace:
    with serving(_GRADS_TO_WAIT) as served, stub_workers(served.address, count):
        time.sleep(_WARM_UP_S)
        return pace(served, _MEASURED_S)


def _idle_rows() -> list[Row]:
    """What workers cost that only wait for tasks."""
    count = _COUNTS[-1]
    with serving(_GRADS_TO_WAIT, runs=False) as served:
        before = served.mark()
        with stub_workers(served.address, count):
            time.sleep(_WARM_UP_S)
            idle = pace(served, _MEASURED_S)
    held = (idle.rss_bytes - before["rss"]) / count / 1024
    return [
        Row.at_most(f"CPU time a second, {count:,} workers waiting", 1e3 * idle.cpu_ms_per_s, "us", 20_000.0),
        Row.at_most(f"memory of each of {count:,} workers waiting", held, "KiB", 1024.0),
        Row(f"threads more with {count:,} workers", idle.threads - before["threads"], "threads"),
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        _serve(int(sys.argv[2]), bool(int(sys.argv[3])))
    else:
        main()
