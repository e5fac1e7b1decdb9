"""A job ends with the best version, also one that was resumed; and what a job refuses."""

import shutil
from pathlib import Path

import numpy as np

from elastable.master.checkpoints.checkpoint import Checkpoint
from tests.elastable.callbacks import freezing_job
from tests.elastable.kept_jobs import kept, killed_at, refusal, store_of, trained

JOB = Path(__file__).with_name("best_weights_job.py")
VERSIONS = 4  # of an epoch


OPTIONS = ("--epochs", "6", "--micro-batch-size", "16", "--workers", "1", "--checkpoint-every", "2")


def content(checkpoint: Checkpoint) -> dict[str, bytes]:
    rows = store_of(checkpoint).lookup({"words": np.arange(freezing_job.ROWS)})["words"]
    kinds = ("variables", "states")
    dense = {key: value.tobytes() for key, value in checkpoint.dense().items() if key.split("/")[0] in kinds}
    return {"rows": rows.tobytes(), **dense}


def test_the_best_version_is_what_a_job_ends_with(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    trained(JOB, whole, *OPTIONS)
    best = content(kept(whole, VERSIONS))
    assert kept(whole).version == 4 * VERSIONS
    assert content(kept(whole)) == best
    assert content(kept(whole, 3 * VERSIONS)) != best

    killed_at(2 * VERSIONS, whole, resumed)
    shutil.rmtree(whole)
    assert "resuming at version 8" in trained(JOB, resumed, *OPTIONS, "--resume")
    assert content(kept(resumed)) == best


def test_a_store_that_a_job_is_resumed_from_is_refused(tmp_path: Path, redis_url: str) -> None:
    message = refusal(JOB, tmp_path, *OPTIONS, "--checkpoint-dir", tmp_path / "saved", "--store", redis_url)
    assert "EarlyStopping(restore_best_weights=True): the store keeps a record" in message


def test_keras_backups_are_refused(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        f"import sys\nsys.path.insert(0, {str(JOB.parent)!r})\nimport keras\n"
        "from freezing_job import data, model\n"
        "def callbacks():\n    return [keras.callbacks.BackupAndRestore('anywhere')]\n"
    )
    assert "backed up and resumed by --checkpoint-dir and --resume" in refusal(job, tmp_path)
