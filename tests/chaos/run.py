"""Many schedules, a few at a time, each conducted in a fork of a process that has imported everything."""

import gc
import json
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.chaos.child import import_everything
from tests.chaos.conductor import LIMIT_S, Outcome, conduct
from tests.chaos.schedules import Schedule, Shape
from tests.chaos.stores import patient, redis_of
from tests.chaos.verdict import Ending

_CALM = "memory"


@dataclass(kw_only=True)
class Run(Outcome):
    """A schedule that was run."""

    schedule: Schedule
    home: Path
    sabotage: str

    def line(self) -> str:
        description = f"{self.seconds:6.1f} s  {self.schedule}"
        if self.gave_up:
            description += f"; gave up: {dict(self.gave_up)}"
        return description + (f"; not reached: {', '.join(self.missed)}" if self.missed else "")


def run_schedules(
    asked: Sequence[tuple[Schedule, str]], home: Path, jobs: int, limit_s: float = LIMIT_S
) -> Iterator[Run]:
    """Runs pairs of a schedule and an error on purpose (or ""), undisturbed jobs of their shapes first; yields each.

    Raises:
        RuntimeError: an undisturbed job failed.
    """
    _get_ready()
    shapes = sorted({schedule.shape for schedule, _ in asked}, key=str)
    calm = [_undisturbed(shape, -1 - number) for number, shape in enumerate(shapes)]
    endings: dict[Shape, Path] = {}
    calm += _compiling([schedule for schedule, _ in asked], -1 - len(shapes))
    for run in _run_all([(schedule, None, "") for schedule in calm], home, jobs, LIMIT_S):
        if run.divergences:
            raise RuntimeError(f"the undisturbed job failed: {run.divergences}; see {run.home}")
        if run.schedule.kind == _CALM:
            endings[run.schedule.shape] = run.home
    yield from _run_all([(schedule, endings[schedule.shape], wrong) for schedule, wrong in asked], home, jobs, limit_s)


def run_undisturbed(shape: Shape, home: Path, evaluate_every: int, limit_s: float) -> Ending:
    """What one job without faults leaves. Raises `RuntimeError` where it fails."""
    _get_ready()
    schedule = replace(_undisturbed(shape, -1), evaluate_every=evaluate_every)
    for run in _run_all([(schedule, None, "")], home, 1, limit_s):
        if run.divergences:
            raise RuntimeError(f"the undisturbed job failed: {run.divergences}; see {run.home}")
        place = run.home
    return _load(place)


def _undisturbed(shape: Shape, seed: int) -> Schedule:
    return Schedule(
        _CALM, seed, shape, 1, checkpoint_every=shape.replay_epoch, evaluate_every=1, transport="grpc", faults=()
    )


def _compiling(asked: Sequence[Schedule], seed: int) -> list[Schedule]:
    """An undisturbed job on each kind of store, so patient that kernels can be compiled: those of faults are not."""
    first = {schedule.store: schedule for schedule in reversed(asked) if redis_of(schedule.store)}
    return [
        replace(_undisturbed(of.shape, seed - number), kind=of.kind, store=patient(template))
        for number, (template, of) in enumerate(sorted(first.items()))
    ]


def _get_ready() -> None:
    import_everything()
    gc.collect()
    gc.freeze()  # forks share the pages of what is never looked at


def _run_all(
    asked: Sequence[tuple[Schedule, Path | None, str]], home: Path, jobs: int, limit_s: float
) -> Iterator[Run]:
    running: dict[int, tuple[Schedule, Path, str]] = {}
    waiting = list(reversed(asked))
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                schedule, expected, sabotage = waiting.pop()
                place = home / f"{schedule.kind}-{sabotage or schedule.seed}"
                running[_fork(schedule, place, expected, sabotage, limit_s)] = (schedule, place, sabotage)
            pid, status = os.waitpid(-1, 0)
            if pid in running:
                yield _read(*running.pop(pid), os.waitstatus_to_exitcode(status))
    finally:
        _interrupt(list(running))


def _interrupt(conductors: Sequence[int]) -> None:
    """Ends conductors before their time, as Ctrl-C does: each ends the processes of its own schedule."""
    for pid in conductors:
        os.kill(pid, signal.SIGINT)
    for pid in conductors:
        os.waitpid(pid, 0)


def _fork(schedule: Schedule, place: Path, expected: Path | None, sabotage: str, limit_s: float) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        outcome = conduct(schedule, place, None if expected is None else _load(expected), sabotage, limit_s)
        _write(outcome, place)
        code = 0
    except BaseException:  # noqa: BLE001 - nothing of the parent may run on here
        traceback.print_exc()
    finally:
        os._exit(code)


def _write(outcome: Outcome, place: Path) -> None:
    if outcome.ending is not None:
        np.savez(place / "ending.npz", **outcome.ending.numbers)  # type: ignore[arg-type]
        document = {"progress": outcome.ending.progress, "evaluations": outcome.ending.evaluations}
        (place / "ending.json").write_text(json.dumps(document))
    document = {name: getattr(outcome, name) for name in ("divergences", "struck", "missed", "gave_up", "seconds")}
    (place / "outcome.json").write_text(json.dumps(document))


def _load(place: Path) -> Ending:
    with np.load(place / "ending.npz", allow_pickle=False) as loaded:
        numbers = {name: loaded[name] for name in loaded.files}
    saved = json.loads((place / "ending.json").read_text())
    return Ending(numbers, saved["progress"], [(version, found) for version, found in saved["evaluations"]])


def _read(schedule: Schedule, place: Path, sabotage: str, code: int) -> Run:
    saved: dict[str, Any] = {"divergences": [f"its conductor ended with {code}"], "gave_up": {}}
    if not code:
        saved = json.loads((place / "outcome.json").read_text())
    saved["gave_up"] = Counter(saved["gave_up"])
    return Run(schedule=schedule, home=place, sabotage=sabotage, **saved)
