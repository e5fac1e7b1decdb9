"""Stub workers against store servers on this machine: rows/s, latencies of versions, processor time by kind of process.

1 to 8 workers and 1 to 4 store servers, over gRPC, with tables in memory. Other runs differ in ids, values of a row and
dense values, and have Redis behind the servers; from all of them comes the calibration of `benchmarks.simulation`.

    python -m benchmarks.scale [ROUNDS]
"""

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.harness import RESULTS, Row, publish
from benchmarks.processes import output_of
from benchmarks.scale.fit import fitted, waits_found
from benchmarks.scale.measuring import measured, shares
from benchmarks.scale.setting import Run, Setting, write_runs
from benchmarks.simulation.calibration import INSTALLED

RUNS = RESULTS / "scale_runs.json"
"""Every run, as it was measured."""

_ROUNDS, _SECONDS = 3, 4.0
_KINDS = {"workers": "worker_s", "store servers": "store_s", "the master": "master_s"}


def main(rounds: int = _ROUNDS) -> None:
    """Measures, prints and writes `results/scale.json`, `results/scale_runs.json` and the calibration."""
    step_s = _dense_step_s()
    print(f"a dense step of the click model takes {1e3 * step_s:.1f} ms", flush=True)
    grid = [Setting(workers, stores, step_s=step_s) for stores in (1, 2, 4) for workers in (1, 2, 4, 8)]
    others = [
        Setting(1, 1, ids=1_024, step_s=step_s),
        Setting(1, 2, ids=65_536, step_s=step_s),
        Setting(2, 1, dim=64, step_s=step_s),
        Setting(1, 1, dense=2_000_000, step_s=step_s),
        Setting(4, 1, dense=2_000_000, step_s=step_s),
        Setting(4, 4, ids=1_024, dense=10_000, step_s=step_s),
        Setting(2, 1, step_s=step_s, redis=True),
        Setting(2, 1, dim=64, step_s=step_s, redis=True),
    ]
    runs: dict[Setting, list[Run]] = defaultdict(list)
    for number in range(rounds):
        for setting in grid + others:
            run = measured(setting, _SECONDS)
            runs[setting].append(run)
            print(f"{number}: {setting}: {run.rows_per_s:,.0f} rows/s", flush=True)
    middle = {setting: _middle(of) for setting, of in runs.items()}
    write_runs(RUNS, list(middle.values()))
    calibration = waits_found(fitted(list(middle.values()), shares(Setting(4, 1))), list(middle.values()))
    INSTALLED.write_text(json.dumps(asdict(calibration), indent=1) + "\n")
    publish("scale", "Stub workers against store servers", [row for setting in grid for row in _rows(middle[setting])])


def _middle(runs: Sequence[Run]) -> Run:
    """The run of a setting whose processor time of a version is the median."""
    ordered = sorted(runs, key=lambda run: (run.worker_s + run.store_s + run.master_s) / run.versions)
    return ordered[len(ordered) // 2]


def _rows(run: Run) -> list[Row]:
    name = f"{run.setting.workers} workers, {run.setting.stores} store servers"
    each = run.rows_per_s / run.setting.stores
    rows = [
        Row(f"{name}: rows of each server", each, "rows/s"),
        Row(f"{name}: p50 of a version", 1e3 * run.p50_s, "ms"),
        Row(f"{name}: p99 of a version", 1e3 * run.p99_s, "ms"),
    ]
    for kind, attribute in _KINDS.items():
        spent = getattr(run, attribute) / run.million_rows
        rows.append(Row(f"{name}: processor time of {kind}, a million rows", spent, "s"))
    return rows


def _dense_step_s() -> float:
    """Processor seconds of the click model's dense step, for as many examples as a micro-batch has ids for."""
    figures = [output_of("benchmarks.scale.dense_step", str(Setting(1, 1).ids)) for _ in "123"]
    return round(statistics.median(map(float, figures)), 4)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
