"""examples/flights as a contender: a master and workers that train it over and over."""

import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.click_job.contenders import Job

_MODEL = Path(__file__).parents[2] / "examples" / "flights" / "model.py"
_MICRO_BATCH, _MICRO_BATCHES = 512, 2
_EPOCHS = 1_000  # more than a benchmark sees
_WARM = 300  # versions: more than an epoch, in which most rows are first touches


def flights_job(name: str, home: Path, options: Sequence[str], workers: int) -> Job:
    """The main job of the README: 1,024 records a version, of each worker a part.

    Args:
        name: Of its logs and run directory.
        home: A folder for them.
        options: More of the master, `--store` for one.
        workers: How many there are.
    """
    job = ["--micro-batch-size", str(_MICRO_BATCH), "--grads-to-wait", str(_MICRO_BATCHES), "--epochs", str(_EPOCHS)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    return Job(name, _MODEL, _MICRO_BATCH * _MICRO_BATCHES, [*job, *options], home, environment, workers, _WARM)
