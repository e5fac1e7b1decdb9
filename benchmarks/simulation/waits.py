"""How much of the processor time of a version is waited for, and how long nobody computes: what explains runs best."""

import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.scale.setting import Run
from benchmarks.simulation.calibration import Calibration
from benchmarks.simulation.cluster import of_run
from benchmarks.simulation.job import simulated

_BESIDE = tuple(share / 20 for share in range(13))
_WAITS = (0.0, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006)


def waits_found(costs: Calibration, runs: Sequence[Run]) -> Calibration:
    """The calibration with those `beside` and `wait` with which the simulation is closest to runs without Redis."""
    memory = [run for run in runs if not run.setting.redis]
    tried = [replace(costs, beside=beside, wait=wait) for beside in _BESIDE for wait in _WAITS]
    return min(tried, key=lambda each: statistics.mean(abs(error(run, each)) for run in memory))


def error(run: Run, costs: Calibration) -> float:
    """By which part the simulated versions a second of a run differ from the measured ones."""
    outcome = simulated(of_run(run), costs, versions=60)
    return outcome.versions / outcome.seconds / (run.versions / run.seconds) - 1
