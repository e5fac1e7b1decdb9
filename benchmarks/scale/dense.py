"""What it takes off the master that store servers sum dense gradients, and what that costs all processes together.

Eight stub workers and four store servers over gRPC, all on this machine; every version takes a micro-batch of each.
With the dense part of the click model, and with one of 10 MB; its gradients summed at the master or at the store
servers, in turns.

    python -m benchmarks.scale.dense
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from benchmarks.harness import Row, compare, publish
from benchmarks.scale.measuring import measured
from benchmarks.scale.setting import Run, Setting

__all__ = ["main"]

_ROUNDS, _SECONDS = 5, 4.0
_PARTS = {"the click model's dense part (0.56 MB)": 140_000, "a dense part of 10 MB": 2_500_000}
_LEAST_SAVED = 4.0  # of the bytes, with eight workers


def main() -> None:
    """Measures, prints and writes `results/dense_at_servers.json`."""
    rows: list[Row] = []
    for name, dense in _PARTS.items():
        at_master = Setting(8, 4, ids=4_096, dense=dense)
        runs: dict[str, list[Run]] = {"master": [], "servers": []}
        for number in range(_ROUNDS):
            for where in sorted(runs, reverse=bool(number % 2)):
                runs[where].append(measured(replace(at_master, dense_at=where), _SECONDS))
        rows += _rows(name, runs["servers"], runs["master"])
    publish("dense_at_servers", "Dense gradients summed at store servers, against at the master", rows)


def _rows(name: str, ours: list[Run], theirs: list[Run]) -> list[Row]:
    def against(of: Callable[[Run], float]) -> tuple[list[float], list[float]]:
        return [of(run) for run in ours], [of(run) for run in theirs]

    moved, before = against(lambda run: run.master_bytes / run.versions)
    saved = compare(f"{name}: bytes through the master, a version", "bytes", before, moved, _LEAST_SAVED)
    return [
        replace(saved, value=saved.reference, reference=saved.value),
        compare(
            f"{name}: processor time of the master, a version", "us",
            *against(lambda run: 1e6 * run.master_s / run.versions),
        ),
        compare(
            f"{name}: processor time of all, a version", "us",
            *against(lambda run: 1e6 * (run.master_s + run.store_s + run.worker_s) / run.versions),
        ),
        compare(
            f"{name}: versions on this one machine", "versions/s", *against(lambda run: run.versions / run.seconds)
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
