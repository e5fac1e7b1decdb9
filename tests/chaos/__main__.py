"""`make chaos`: seeded schedules of faults on real processes, and the tally of how they ended."""

import argparse
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # whose threads would not survive a fork

import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.conductor import LIMIT_S
from tests.chaos.run import Run, run_schedules
from tests.chaos.sabotage import PROOFS, SABOTAGES
from tests.chaos.schedules import schedule_of
from tests.chaos.stores import KINDS


def main(words: Sequence[str] | None = None) -> int:
    """Runs the schedules asked for; 1 if any of them diverged, or an error on purpose did not."""
    asked = _parsed(words)
    kinds = asked.kind or list(KINDS)
    seeds = [asked.seed] if asked.seed is not None else range(asked.first_seed, asked.first_seed + asked.schedules)
    schedules = [
        schedule_of(kind, seed, asked.model, asked.faults)
        for number, seed in enumerate(seeds)
        for kind in (kinds if asked.seed is not None else [kinds[number % len(kinds)]])
    ]
    pairs = [(schedule, asked.sabotage) for schedule in schedules]
    if asked.noticed:
        pairs = [(schedule, sabotage) for sabotage, schedule in PROOFS.items()]
    home = asked.home or Path(tempfile.mkdtemp(prefix="chaos-", dir=fast_folder()))
    runs: list[Run] = []
    for run in run_schedules(pairs, home, asked.jobs, asked.limit):
        runs.append(run)
        if run.divergences and not asked.noticed:
            print_failure(run)
        elif asked.verbose:
            print(run.line(), flush=True)
        if not run.divergences and not asked.keep:
            shutil.rmtree(run.home, ignore_errors=True)
    if asked.noticed:
        if not asked.keep:
            shutil.rmtree(home, ignore_errors=True)
        return print_noticed(runs)
    print_tally(runs)
    failed = any(run.divergences for run in runs)
    if not failed and not asked.keep:
        shutil.rmtree(home, ignore_errors=True)
    return int(failed)


def _parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make chaos ARGS=...", description=__doc__)
    parser.add_argument("--schedules", type=int, default=300, help="how many")
    parser.add_argument("--seed", type=int, help="this one alone, of every kind asked for")
    parser.add_argument("--first-seed", type=int, default=1, help="seeds count from here")
    parser.add_argument("--kind", choices=KINDS, action="append", help="of store; may be repeated [all]")
    parser.add_argument("--model", choices=("light", "keras"), help="[one in ten is of Keras]")
    parser.add_argument("--faults", type=int, help="so many in every schedule [1 to 4]")
    parser.add_argument("--jobs", type=int, default=2 * (os.cpu_count() or 1), help="schedules at a time")
    parser.add_argument("--sabotage", choices=sorted(SABOTAGES), default="", help="an error to be noticed")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds after which a schedule has failed")
    parser.add_argument("--noticed", action="store_true", help="only show that errors put in on purpose are noticed")
    parser.add_argument("--home", type=Path, help="folder for logs [a new one; kept where something diverged]")
    parser.add_argument("--keep", action="store_true", help="keep all logs")
    parser.add_argument("--verbose", action="store_true", help="a line for every schedule")
    return parser.parse_args(words)


def fast_folder() -> str | None:
    """Where fsync costs nothing: what is killed here are processes, never the machine."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


_LOG_LINES = 25


def print_failure(run: Run) -> None:
    schedule = run.schedule
    print(f"\nDIVERGED  {run.line()}")
    for problem in run.divergences:
        print(f"  {problem}")
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
        problem = run.divergences[0] if run.divergences else "no divergence"
        print(f"{run.sabotage:<22} {'' if right else 'WRONG: '}{problem}")
    print(f"errors on purpose        {len(runs)}, not reported right {missed}", flush=True)
    return int(missed > 0)


def print_tally(runs: Sequence[Run]) -> None:
    schedules = Counter(f"{run.schedule.kind}, {run.schedule.shape.model}" for run in runs)
    struck = Counter(name for run in runs for name in run.struck)
    gave_up: Counter[str] = sum((run.gave_up for run in runs), Counter())
    seconds = sorted(run.seconds for run in runs)
    print(f"\nschedules                {len(runs)}")
    for kind, count in sorted(schedules.items()):
        print(f"  {kind:<22} {count}")
    print(f"faults                   {sum(struck.values())} of {sum(len(run.schedule.faults) for run in runs)} planned")
    for name, count in sorted(struck.items()):
        print(f"  {name:<22} {count}")
    print(f"ended by themselves      {sum(gave_up.values())}")
    for name, count in sorted(gave_up.items()):
        print(f"  {name:<22} {count}")
    if seconds:
        print(f"seconds of a schedule    median {seconds[len(seconds) // 2]:.1f}, longest {seconds[-1]:.1f}")
    print(f"DIVERGENCES              {sum(bool(run.divergences) for run in runs)} of {len(runs)} schedules", flush=True)


if __name__ == "__main__":
    sys.exit(main())
