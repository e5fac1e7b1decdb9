"""Predicts the measured runs of `benchmarks.scale`, then draws what larger clusters would do.

python -m benchmarks.simulation
"""

import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

from benchmarks.click_job.sizes import BATCH, FEATURES
from benchmarks.harness import RESULTS, Row, publish
from benchmarks.scale.setting import read_runs
from benchmarks.simulation.calibration import Calibration
from benchmarks.simulation.cluster import Cluster, Outcome, of_run
from benchmarks.simulation.job import simulated
from elastable.embedding_store.errors import BadInput

_PLOTS = Path(__file__).parents[2] / "docs" / "images"
_WORKERS = (1, 3, 10, 30, 100, 300, 1_000)
_STORES = (1, 4, 16, 64)
_GBIT = (1.0, 10.0, 25.0, 100.0)
_DIMS = (16, 32, 64, 128)
_ROWS = (1e6, 1e7, 1e8, 1e9, 1e10)
_RUNS = read_runs(RESULTS / "scale_runs.json")
_STEP_S = _RUNS[0].setting.step_s * BATCH * FEATURES / _RUNS[0].setting.ids  # as measured, of a whole batch
_BASE = Cluster(
    workers=10, stores=16, ids=50_000, dim=16, dense=140_000, step_s=_STEP_S, rows=1e9, examples=BATCH, gbit=10.0,
    spread=0.1,
)  # fmt: skip
"""The click model with a batch of 2,048: 10 workers on hosts of their own, cards of 10 Gbit/s."""

_LARGE = 2_500_000
"""Dense values of a network of 10 MB."""

_WANTED = (50_000, 200_000, 500_000)
_ROW_BYTES = 2 * 4 * _BASE.dim + 24  # a value and a slot of Adagrad each, and its place in the index of ids
_HOST_BYTES = 48 * 2**30

Series = Mapping[str, Sequence[Outcome]]


def main() -> None:
    """Simulates, prints and writes `results/simulation.json` and the plots of docs/store-servers.md."""
    costs = Calibration.read()
    rows = _predictions(costs)
    rows += _workers(costs) + _cards(costs) + _sizes(costs) + _stragglers(costs) + _needed(costs)
    publish("simulation", "Clusters of hosts of their own, simulated", rows)


def _predictions(costs: Calibration) -> list[Row]:
    rows = []
    for run in _RUNS:
        of = run.setting
        outcome = simulated(of_run(run), costs)
        name = f"predicted: {of.workers} workers, {of.stores} servers, {of.ids:,} ids x {of.dim}, {of.dense:,} dense"
        measured, predicted = run.versions / run.seconds, outcome.versions / outcome.seconds
        rows.append(Row(name + (", Redis" * of.redis), predicted, "versions/s", measured, predicted / measured))
    return rows


def _workers(costs: Calibration) -> list[Row]:
    """Examples/s and latency by workers, for numbers of store servers, sync and async, small and large networks."""
    series: dict[str, list[Outcome]] = {}
    for stores in _STORES:
        series[f"{stores} store servers"] = [
            simulated(replace(_BASE, workers=n, stores=stores), costs, *_length(n)) for n in _WORKERS
        ]
    # Each worker's push may be two rounds of all the others behind.
    series["16, asynchronous, bounded"] = [
        simulated(replace(_BASE, workers=n, staleness=2 * n), costs, *_length(n)) for n in _WORKERS
    ]
    series["16, a network of 10 MB"] = [
        simulated(replace(_BASE, workers=n, dense=_LARGE), costs, *_length(n)) for n in _WORKERS
    ]
    _plot("scale-workers.svg", "workers", _WORKERS, series)
    return _shown(series, _WORKERS, "workers")


def _cards(costs: Calibration) -> list[Row]:
    """Examples/s by network cards, for values of a row."""
    series = {
        f"rows of {dim} values": [simulated(replace(_BASE, workers=30, dim=dim, gbit=gbit), costs) for gbit in _GBIT]
        for dim in _DIMS
    }
    _plot("scale-network.svg", "Gbit/s of every network card", _GBIT, series)
    return _shown(series, _GBIT, "Gbit/s")


def _sizes(costs: Calibration) -> list[Row]:
    """Examples/s by rows, with Redis behind the store servers."""
    series = {
        f"30 workers, {stores} store servers with Redis": [
            simulated(replace(_BASE, workers=30, stores=stores, rows=rows, redis=True), costs) for rows in _ROWS
        ]
        for stores in _STORES
    }
    _plot("scale-rows.svg", "rows", _ROWS, series)
    return _shown(series, _ROWS, "rows")


def _stragglers(costs: Calibration) -> list[Row]:
    """What steps of uneven length cost: synchronous jobs wait for the slowest."""
    rows = []
    for spread in (0.0, 0.1, 0.3, 1.0):
        outcome = simulated(replace(_BASE, workers=10, spread=spread), costs, 60)
        name = f"10 workers, 16 store servers, steps that differ by {100 * spread:.0f} %"
        rows.append(Row(name, outcome.examples_per_s, "examples/s", note=outcome.limit))
    return rows


def _needed(costs: Calibration) -> list[Row]:
    """Clusters that hold so many rows in memory, on hosts with 48 GiB for them, and train so many examples a second."""
    found = []
    for count in (1e8, 1e9, 1e10):
        for wanted in _WANTED:
            one, outcome = smallest(replace(_BASE, stores=math.ceil(count * _ROW_BYTES / _HOST_BYTES)), wanted, costs)
            size = count * _ROW_BYTES / one.stores / 2**30
            name = f"{count:,.0f} rows, {wanted:,}: {one.workers} workers, {one.stores} servers of {size:,.0f} GiB"
            found.append(Row(name, outcome.examples_per_s, "examples/s", note=outcome.limit))
    return found


def smallest(least: Cluster, examples_per_s: float, costs: Calibration, workers: int = 128) -> tuple[Cluster, Outcome]:
    """The fewest hosts that train so many examples a second, with `least.stores` store servers or more of them.

    Raises:
        BadInput: 64 times as many store servers and so many workers do not.
    """
    found: list[tuple[Cluster, Outcome]] = []
    for stores in (least.stores * 2**step for step in range(7)):
        clusters = [replace(least, stores=stores, workers=each) for each in range(1, workers + 1)]
        at = bisect_left(clusters, examples_per_s, key=lambda one: simulated(one, costs).examples_per_s)
        found += [(one, simulated(one, costs)) for one in clusters[at : at + 1]]
    if not found:
        raise BadInput(f"{examples_per_s:,.0f} examples/s: no number of hosts that was tried reaches them")
    return min(found, key=lambda each: each[0].workers + each[0].stores)


def _length(workers: int) -> tuple[int, int]:
    """Versions that are counted, and those before: fewer where there is more to simulate."""
    return (10, 2) if workers <= 100 else (4, 1)


def _shown(series: Series, every: Sequence[float], unit: str) -> list[Row]:
    rows = []
    for name, outcomes in series.items():
        for at, one in zip(every, outcomes, strict=True):
            latency = f"{one.limit}; p50 of a version {1e3 * statistics.median(one.latencies):,.0f} ms"
            rows.append(Row(f"{name}: {at:,.0f} {unit}", one.examples_per_s, "examples/s", note=latency))
    return rows


def _plot(name: str, axis: str, every: Sequence[float], series: Series) -> None:
    mpl.rcParams.update({"svg.hashsalt": "elastable", "svg.fonttype": "none", "font.size": 8})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for label, outcomes in series.items():
        left.plot(every, [outcome.examples_per_s for outcome in outcomes], marker="o", markersize=3, label=label)
        right.plot(
            every, [1e3 * statistics.median(outcome.latencies) for outcome in outcomes], marker="o", markersize=3
        )
    for axes, title in ((left, "examples/s"), (right, "p50 of a version, ms")):
        axes.set(xscale="log", yscale="log", xlabel=axis, title=title)
        axes.grid(alpha=0.3)
    left.legend(frameon=False, fontsize=7)
    _PLOTS.mkdir(exist_ok=True)
    figure.savefig(_PLOTS / name, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
