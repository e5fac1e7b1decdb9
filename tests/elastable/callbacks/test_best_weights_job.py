"""A job ends with the best version, also one that was resumed; and what a job refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from elastable.embedding_store.engine import MemoryStore
from elastable.master.checkpoints.checkpoint import Checkpoint, open_checkpoint
from elastable.master.checkpoints.restoring import restore_tables
from tests.elastable.callbacks import freezing_job
from tests.elastable.processes import Finished, run_elastable

JOB = Path(__file__).with_name("best_weights_job.py")
VERSIONS = 4  # of an epoch


def train(home: Path, *more: str | Path, job: Path = JOB) -> Finished:
    options = ("--epochs", "6", "--micro-batch-size", "16", "--workers", "1", "--no-export", "--deadline", "60")
    saving = ("--checkpoint-dir", home / "saved", "--checkpoint-every", "2", "--keep", "0")
    return run_elastable("train", job, *options, *saving, "--run-dir", home / "runs", *more)


def content(checkpoint: Checkpoint) -> dict[str, bytes]:
    store = MemoryStore()
    restore_tables(checkpoint, store)
    rows = store.lookup({"words": np.arange(freezing_job.ROWS)})["words"]
    kinds = ("variables", "states")
    dense = {key: value.tobytes() for key, value in checkpoint.dense().items() if key.split("/")[0] in kinds}
    return {"rows": rows.tobytes(), **dense}


def last(home: Path) -> Path:
    """That of the job's end, which takes the place of that of the schedule."""
    return sorted((home / "saved").glob("ckpt-*"))[-1]


def test_the_best_version_is_what_a_job_ends_with(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    ran = train(whole)
    assert ran.code == 0, ran.err
    best = content(open_checkpoint(whole / "saved" / f"ckpt-{VERSIONS:010d}"))
    assert last(whole).name.startswith(f"ckpt-{4 * VERSIONS:010d}")
    assert content(open_checkpoint(last(whole))) == best
    assert content(open_checkpoint(whole / "saved" / f"ckpt-{3 * VERSIONS:010d}")) != best

    shutil.copytree(whole / "saved", resumed / "saved")
    for checkpoint in (resumed / "saved").glob("ckpt-*"):
        if checkpoint.name > f"ckpt-{2 * VERSIONS:010d}":
            shutil.rmtree(checkpoint)
    shutil.rmtree(whole)
    ran = train(resumed, "--resume")
    assert ran.code == 0, ran.err
    assert "resuming at version 8" in ran.out
    assert content(open_checkpoint(last(resumed))) == best


def test_a_store_that_a_job_is_resumed_from_is_refused(tmp_path: Path, redis_url: str) -> None:
    ran = train(tmp_path, "--store", redis_url)
    assert ran.code != 0
    assert "EarlyStopping(restore_best_weights=True): the store keeps a record" in " ".join((ran.out + ran.err).split())


def test_keras_backups_are_refused(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        f"import sys\nsys.path.insert(0, {str(JOB.parent)!r})\nimport keras\n"
        "from freezing_job import data, model\n"
        "def callbacks():\n    return [keras.callbacks.BackupAndRestore('anywhere')]\n"
    )
    ran = train(tmp_path, job=job)
    assert ran.code != 0
    assert "backed up and resumed by --checkpoint-dir and --resume" in " ".join((ran.out + ran.err).split())
