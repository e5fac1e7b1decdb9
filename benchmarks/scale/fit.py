"""From measured runs to a calibration: what a version, a call, a row and a value cost each kind of process."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from benchmarks.harness import machine
from benchmarks.scale.setting import Run
from benchmarks.simulation.calibration import Calibration
from benchmarks.simulation.cluster import of_run
from benchmarks.simulation.job import simulated

Float64 = npt.NDArray[np.float64]

# Names of a calibration, in the order of the features below.
_WORKER = ("worker_version", "worker_server", "worker_row", "worker_value", "worker_dense")
_STORE = ("store_push", "store_version", "store_row", "store_value")
_MASTER = ("master_version", "master_push", "master_server", "master_dense", "master_update")
_STORE_REDIS = ("store_redis_row", "store_redis_value")
_REDIS = ("redis_row", "redis_value")


_CROWDS = tuple(crowd / 200 for crowd in range(21))


def fitted(runs: Sequence[Run], shares: tuple[float, float]) -> Calibration:
    """The calibration that explains the processor time of runs best, by relative error; no cost is negative.

    `beside` and `wait` are still 0: `waits_found` finds them.

    Args:
        runs: In which workers, store servers, ids, values of a row and dense values differ independently; at least one
            with Redis.
        shares: Of lookups and pushes in a store server's time for rows.
    """
    tried = [_fitted(runs, shares, crowd) for crowd in _CROWDS]
    return min(tried, key=lambda each: each[1])[0]


def _fitted(runs: Sequence[Run], shares: tuple[float, float], crowd: float) -> tuple[Calibration, float]:
    """As `fitted`, for a `Calibration.crowd`; and the sum of the squares of all relative errors without Redis."""
    memory = [run for run in runs if not run.setting.redis]
    (worker, of_worker), (store, of_store), (master, of_master) = (
        _costs(memory, used, features, crowd)
        for used, features in (
            (lambda run: run.worker_s, _of_worker),
            (lambda run: run.store_s, _of_store),
            (lambda run: run.master_s, _of_master),
        )
    )
    with_redis = [run for run in runs if run.setting.redis]
    in_redis, _ = _costs(with_redis, lambda run: run.redis_s, _of_redis, crowd)

    def writing(run: Run) -> float:
        return run.store_s - run.versions * _crowded(run, crowd) * float(np.dot(store, _of_store(run)))

    lookup, push = shares
    seconds = {
        **dict(zip(_WORKER, worker, strict=True)),
        **dict(zip(_STORE, store, strict=True)),
        **dict(zip(_MASTER, master, strict=True)),
        **dict(zip(_STORE_REDIS, _costs(with_redis, writing, _of_redis, crowd)[0], strict=True)),
        **dict(zip(_REDIS, in_redis, strict=True)),
        "crowd": crowd,
        "beside": 0.0,
        "wait": 0.0,
    }
    rounded = {name: float(f"{value:.4g}") for name, value in seconds.items()}
    costs = Calibration(machine(), lookup_share=round(lookup, 3), push_share=round(push, 3), **rounded)
    return costs, of_worker + of_store + of_master


def least_squares(features: Float64, values: Float64) -> Float64:
    """The costs, none negative, whose sums over `features[n, c]` differ least from `values[n]`, relative to these."""
    scaled, ones = features / values[:, None], np.ones(len(values))
    taken = list(range(features.shape[1]))
    while taken:
        found = np.linalg.lstsq(scaled[:, taken], ones, rcond=None)[0]
        if (found >= 0).all():
            break
        taken.pop(int(np.argmin(found * scaled[:, taken].mean(0))))
    costs = np.zeros(features.shape[1])
    costs[taken] = found if taken else 0.0
    return costs


def _costs(
    runs: Sequence[Run], used: Callable[[Run], float], features: Callable[[Run], tuple[float, ...]], crowd: float
) -> tuple[Float64, float]:
    """The costs, and the sum of the squares of the relative errors that are left."""
    versions = np.array([run.versions for run in runs], np.float64)
    seconds = np.array([used(run) for run in runs]) / versions
    every = np.array([features(run) for run in runs]) * np.array([[_crowded(run, crowd)] for run in runs])
    costs = least_squares(every, seconds)
    return costs, float(np.square(every @ costs / seconds - 1).sum())


def _crowded(run: Run, crowd: float) -> float:
    """As `Calibration.crowded`, of the processes of a run."""
    return 1.0 + crowd * max(0.0, (run.setting.workers + run.setting.stores + 1) / run.cores - 1.0)


def _of_worker(run: Run) -> tuple[float, ...]:
    of, rows = run.setting, run.unique
    return (of.workers, of.workers * of.stores, of.workers * rows, of.workers * rows * of.dim, of.workers * of.dense)


def _of_store(run: Run) -> tuple[float, ...]:
    of, rows = run.setting, run.unique
    return of.workers * of.stores, of.stores, of.workers * rows, of.workers * rows * of.dim


def _of_master(run: Run) -> tuple[float, ...]:
    of = run.setting
    return 1.0, of.workers, of.stores, of.workers * of.dense, of.dense


def _of_redis(run: Run) -> tuple[float, ...]:
    of = run.setting
    rows = of.rows * -np.expm1(-of.workers * run.unique / of.rows)  # different rows of a version
    return rows, rows * of.dim


# How much of the processor time of a version is waited for, and how long nobody computes


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
