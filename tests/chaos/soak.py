"""`make soak`: many minutes of training with a worker killed every ten seconds; nothing may grow, no bit may differ."""

import argparse
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # whose threads would not survive a fork

from tests.chaos.__main__ import fast_folder
from tests.chaos.cluster import Cluster, Process
from tests.chaos.conductor import LIMIT_S
from tests.chaos.run import run_undisturbed
from tests.chaos.schedules import Schedule, Shape
from tests.chaos.stores import KINDS, store_of
from tests.chaos.verdict import divergences, ending_of

_KINDS = [kind for kind in KINDS if not kind.startswith(("every", "async"))]  # Adagrad's rows are the same in "every"
_PAUSE_S = 0.06
_PACE_VERSIONS = 1920  # of a job without kills, by which the machine's pace is taken; its start counts little
_AMPLE = 1.15  # the time asked for is the least
_EVERY = 48  # versions between checkpoints, and between evaluations
_WARM_UP = 0.2  # of the time; then the first part is compared with the last
_PART = 0.2
_GROWTH = 0.05
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Sample:
    """One look at the master.

    Attributes:
        threads, descriptors: It has.
    """

    seconds: float  # since the beginning
    megabytes: float  # it holds resident
    threads: int
    descriptors: int
    workers: int  # processes that run
    version: int  # the newest acknowledged
    killed: int  # workers, so far


def main(words: Sequence[str] | None = None) -> int:
    """Soaks, prints a table and the verdict; 1 if anything grew, was left over or differed."""
    parser = argparse.ArgumentParser(prog="make soak ARGS=...", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="about so long [20]")
    parser.add_argument("--kill-every", type=float, default=10.0, metavar="SECONDS", help="[10]")
    parser.add_argument("--kind", choices=_KINDS, default="memory", help="of store [memory]")
    parser.add_argument("--model", choices=("keras", "light"), default="keras")
    asked = parser.parse_args(words)
    home = Path(tempfile.mkdtemp(prefix="soak-", dir=fast_folder()))
    shape = Shape(asked.model, "adagrad", 4)
    short = replace(shape, epochs=_PACE_VERSIONS * shape.epochs // shape.versions)
    schedule = Schedule(asked.kind, 0, short, 2, _EVERY, _EVERY, "auto", (), 3, _PAUSE_S, store_of(asked.kind, 0))
    pace = short.versions / _seconds_of(schedule, home / "pace")
    shape = replace(shape, epochs=max(2, round(_AMPLE * 60 * asked.minutes * pace * shape.epochs / shape.versions)))
    schedule = replace(schedule, shape=shape)
    print(f"{shape.versions:,} versions of {shape.epochs:,} epochs; first without any disturbance", flush=True)
    expected = run_undisturbed(shape, home / "calm", _EVERY, 10 * LIMIT_S + 60 * asked.minutes)
    print("   minute  version  killed  workers   master MB  threads  descriptors", flush=True)
    soak = _Soak(schedule, home / "soaked", asked.kill_every, 3 * 60 * asked.minutes + LIMIT_S)
    problems = soak.run()
    problems += divergences(ending_of(home / "soaked"), expected, schedule)
    problems += _grown(soak.samples)
    for line in problems:
        print(f"  {line}")
    print(f"minutes        {soak.samples[-1].seconds / 60:8.1f}")
    print(f"WRONG  {len(problems)}" + (f"; logs: {home}" if problems else ""), flush=True)
    if not problems:
        shutil.rmtree(home, ignore_errors=True)
    return int(bool(problems))


def _seconds_of(schedule: Schedule, home: Path) -> float:
    """How long the job takes where nothing is killed."""
    soak, began = _Soak(schedule, home, 10 * LIMIT_S, 10 * LIMIT_S, printing=False), time.monotonic()
    if problems := soak.run():
        raise SystemExit(f"a job without kills, by which the pace is taken: {'; '.join(problems)}; logs: {home}")
    return time.monotonic() - began


class _Soak:
    def __init__(
        self, schedule: Schedule, home: Path, kill_every_s: float, limit_s: float, printing: bool = True
    ) -> None:
        self._cluster = Cluster(schedule, home, "", lambda *_: None, most_lives=sys.maxsize)
        self._began = time.monotonic()
        self._kill_every_s = kill_every_s
        self._give_up = self._began + limit_s
        self._killed = 0
        self._printed = -1
        self._printing = printing
        self.samples: list[Sample] = []

    def run(self) -> list[str]:
        """Until the job has ended; what went wrong with its processes."""
        cluster = self._cluster
        try:
            cluster.begin(self._give_up)
            cluster.timers.after(self._kill_every_s, self._kill)
            cluster.timers.after(1.0, self._look)
            while not cluster.over and time.monotonic() < self._give_up:
                cluster.turn()
            leave = time.monotonic() + LIMIT_S
            while cluster.processes and time.monotonic() < leave:
                cluster.turn()
            wrong = [f"{process.role} {process.number} was left over" for process in cluster.processes.values()]
            wrong += [] if cluster.over else ["the job did not end in time"]
            # A worker that was sent away by the master's end is not meant here.
            wrong += [f"gave up: {what} ({count})" for what, count in cluster.gave_up.items()]
        finally:
            left = cluster.close()
        return wrong + left

    def _kill(self) -> None:
        workers = sorted(self._of("worker"), key=lambda process: process.number)
        if workers and not self._cluster.over:
            victim = workers[self._killed % len(workers)]
            victim.killed = True
            os.kill(victim.pid, signal.SIGKILL)
            self._killed += 1
        self._cluster.timers.after(self._kill_every_s, self._kill)

    def _look(self) -> None:
        for master in self._of("master"):
            sample = self._sample(master)
            self.samples.append(sample)
            if self._printing and int(sample.seconds // 60) != self._printed:
                self._printed = int(sample.seconds // 60)
                _print(sample)
        if not self._cluster.over:
            self._cluster.timers.after(1.0, self._look)

    def _sample(self, master: Process) -> Sample:
        place = Path(f"/proc/{master.pid}")
        return Sample(
            seconds=time.monotonic() - self._began,
            megabytes=int((place / "statm").read_text().split()[1]) * _PAGE / 2**20,
            threads=len(list((place / "task").iterdir())),
            descriptors=len(list((place / "fd").iterdir())),
            workers=len(self._of("worker")),
            version=self._cluster.acknowledged,
            killed=self._killed,
        )

    def _of(self, role: str) -> list[Process]:
        return [process for process in self._cluster.processes.values() if process.role == role]


def _print(sample: Sample) -> None:
    print(
        f"{sample.seconds / 60:9.1f}{sample.version:9,}{sample.killed:8}{sample.workers:9}"
        f"{sample.megabytes:12.1f}{sample.threads:9}{sample.descriptors:13}",
        flush=True,
    )


def _grown(samples: Sequence[Sample]) -> list[str]:
    """What the master holds more of at the end than at the beginning."""
    warm = samples[int(_WARM_UP * len(samples)) :]
    part = max(1, int(_PART * len(samples)))
    problems = []
    for name, allowed in (("megabytes", _GROWTH), ("threads", 0.0), ("descriptors", 0.0)):
        first, last = (
            statistics.median(getattr(sample, name) for sample in chosen) for chosen in (warm[:part], warm[-part:])
        )
        print(f"{name:<14} {first:8.1f} -> {last:8.1f}  ({100 * (last / first - 1):+.1f} %)")
        if last > first * (1 + allowed) and last - first > 1:
            problems.append(f"{name} grew from {first:.1f} to {last:.1f}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
