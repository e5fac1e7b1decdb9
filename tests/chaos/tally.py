"""What `make chaos` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.chaos.run import Run

__all__ = ["print_failure", "print_noticed", "print_tally"]

_LOG_LINES = 25


def print_failure(run: Run) -> None:
    """A schedule that diverged: how, how to repeat it, and what its processes said last."""
    schedule = run.schedule
    print(f"\nDIVERGED  {run.line()}")
    for told in run.divergences:
        print(f"  {told}")
    print(f'  repeat: make chaos ARGS="--kind {schedule.kind} --seed {schedule.seed}"; logs: {run.home}', flush=True)
    for log in sorted(run.home.glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        print(f"  --- {log.name}")
        print("\n".join(f"  {line}" for line in lines), flush=True)


def print_noticed(runs: Sequence[Run]) -> int:
    """What became of errors put in on purpose; 1 if one was not noticed, or one was that is none."""
    missed = 0
    for run in sorted(runs, key=lambda run: run.sabotage):
        right = bool(run.divergences) != (run.sabotage == "repeated-push")
        missed += not right
        told = run.divergences[0] if run.divergences else "no divergence"
        print(f"{run.sabotage:<22} {'' if right else 'WRONG: '}{told}")
    print(f"errors on purpose        {len(runs)}, not told right {missed}", flush=True)
    return int(missed > 0)


def print_tally(runs: Sequence[Run]) -> None:
    """Schedules by kind, faults by kind, processes that gave up, divergences."""
    schedules = Counter(f"{run.schedule.kind}, {run.schedule.shape.model}" for run in runs)
    struck = Counter(told for run in runs for told in run.struck)
    gave_up: Counter[str] = sum((run.gave_up for run in runs), Counter())
    seconds = sorted(run.seconds for run in runs)
    print(f"\nschedules                {len(runs)}")
    for kind, count in sorted(schedules.items()):
        print(f"  {kind:<22} {count}")
    print(f"faults                   {sum(struck.values())} of {sum(len(run.schedule.faults) for run in runs)} planned")
    for told, count in sorted(struck.items()):
        print(f"  {told:<22} {count}")
    print(f"ended by themselves      {sum(gave_up.values())}")
    for told, count in sorted(gave_up.items()):
        print(f"  {told:<22} {count}")
    if seconds:
        print(f"seconds of a schedule    median {seconds[len(seconds) // 2]:.1f}, longest {seconds[-1]:.1f}")
    print(f"DIVERGENCES              {sum(bool(run.divergences) for run in runs)} of {len(runs)} schedules", flush=True)
