"""Two replicas that shard optimizer state, or weights too, compared with two that shard nothing.

Each contender is two processes over MPI that train a perceptron with two
hidden layers of 2,048 (4.3 million weights, Adam); all take turns. Bytes of
optimizer state and weights are measured on one replica's variables. Resident
memory of its process, at the end of training and at its peak, is relative to
the time before the model was created.

    python -m benchmarks.replicas.sharded_training
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness import Row, compare, interleaved, publish

_ROOT = Path(__file__).parents[2]
_REPLICAS, _WIDTH, _BATCH, _ROUNDS = 2, 2048, 64, 3
_LIMIT_S = 300.0
_FIGURES = {
    "step_us": ("a step", "us"),
    "state": ("optimizer state of a replica", "B"),
    "weights": ("weights of a replica between steps", "B"),
    "resident": ("resident memory at the end", "B"),
    "peak": ("resident memory at most", "B"),
    "sent": ("sent by a replica in a step", "B"),
}
"""What a replica prints -> its row, and its unit."""

_SHARED = {"none": "nothing shared", "state": "state shared", "both": "weights and state shared"}


def main() -> None:
    """Measures, prints and writes `results/sharded_training.json`."""
    publish("sharded_training", f"Training over {_REPLICAS} replicas, MLP {_WIDTH}-{_WIDTH}, Adam", measured())


def measured(width: int = _WIDTH, rounds: int = _ROUNDS) -> list[Row]:
    """The rows of the table: every figure compared with two replicas that shard nothing."""
    runs = interleaved({name: partial(_run, name, width) for name in _SHARED}, rounds)
    figures = {name: {key: [run[key] for run in found] for key in found[0]} for name, found in runs.items()}
    return [row for name in ("state", "both") for row in _rows(_SHARED[name], figures[name], figures["none"])]


def _rows(what: str, ours: Mapping[str, Sequence[float]], theirs: Mapping[str, Sequence[float]]) -> list[Row]:
    return [compare(f"{what}: {name}", unit, ours[key], theirs[key]) for key, (name, unit) in _FIGURES.items()]


def _run(shared: str, width: int) -> Mapping[str, float]:
    program = ["-m", "benchmarks.replicas.sharded_replica", shared, str(width), str(_BATCH)]
    ran = subprocess.run(
        [sys.executable, "-m", "elastable", "replicas", "-n", str(_REPLICAS), *program],
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        cwd=_ROOT,
        env={"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ},
        check=False,
    )
    reported = [line[line.index("{") :] for line in ran.stdout.splitlines() if '{"step_us"' in line]
    if ran.returncode or len(reported) != 1:
        raise RuntimeError(f"{' '.join(program)} ended with {ran.returncode}:\n{ran.stdout}{ran.stderr}")
    figures: dict[str, float] = json.loads(reported[0])
    return figures


if __name__ == "__main__":
    main()
