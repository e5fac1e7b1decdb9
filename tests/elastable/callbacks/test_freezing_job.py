"""A callback of a job freezes layers: its workers hold to it, and so does a job that goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

import elastable as et
from elastable.embedding_store.engine import MemoryStore
from elastable.master.checkpoints.checkpoint import Checkpoint, open_checkpoint
from elastable.master.checkpoints.comparing import compare_dense, compare_tables
from elastable.master.checkpoints.restoring import restore_tables
from tests.elastable.callbacks import freezing_job as job
from tests.elastable.processes import run_elastable

VERSIONS = 4  # of an epoch


def train(home: Path, *more: str) -> str:
    options = ("--epochs", str(job.EPOCHS), "--micro-batch-size", str(job.BATCH), "--workers", "1", "--no-export")
    saving = ("--checkpoint-dir", home / "saved", "--checkpoint-every", "4", "--keep", "0", "--deadline", "60")
    ran = run_elastable("train", job.__file__, *options, *saving, "--no-lazy", "--run-dir", home / "runs", *more)
    assert ran.code == 0, f"{ran.out}\n{ran.err}"
    return ran.out


def at_epoch(home: Path, epoch: int) -> Checkpoint:
    return open_checkpoint(saved_at(home, epoch)[-1])


def saved_at(home: Path, epoch: int) -> list[Path]:
    """That of the schedule, and after it that of the job's end."""
    return sorted((home / "saved").glob(f"ckpt-{epoch * VERSIONS:010d}*"))


def rows_of(checkpoint: Checkpoint) -> np.ndarray:
    store = MemoryStore()
    restore_tables(checkpoint, store)
    return store.lookup({"words": np.arange(job.ROWS)})["words"]


def test_workers_hold_to_what_callbacks_freeze(tmp_path: Path) -> None:
    train(tmp_path / "whole")
    rows = [rows_of(at_epoch(tmp_path / "whole", epoch)) for epoch in range(1, job.EPOCHS + 1)]
    np.testing.assert_array_equal(rows[1], rows[0])
    np.testing.assert_array_equal(rows[2], rows[0])
    assert np.abs(rows[3] - rows[0]).min(axis=1).max() > 1e-3

    # Resumed in the second of the frozen epochs, before the callback sets anything again.
    shutil.copytree(tmp_path / "whole" / "saved", tmp_path / "resumed" / "saved")
    for epoch in (3, 4, 5):
        for checkpoint in saved_at(tmp_path / "resumed", epoch):
            shutil.rmtree(checkpoint)
    assert "resuming at version 8" in train(tmp_path / "resumed", "--resume")
    one, other = (at_epoch(tmp_path / name, job.EPOCHS) for name in ("whole", "resumed"))
    assert compare_dense(one, other) == []
    assert all(table.same for table in compare_tables(one, other))

    # In one process, which test_freezing.py compares with Keras.
    model = job.model()
    et.fit(
        model,
        job.data("train"),
        epochs=job.EPOCHS,
        batch_size=job.BATCH,
        callbacks=job.callbacks(),
        lazy=False,
        verbose=False,
    )
    np.testing.assert_allclose(rows[-1], model.get_layer("words").read_rows(np.arange(job.ROWS)), rtol=1e-5, atol=1e-6)
