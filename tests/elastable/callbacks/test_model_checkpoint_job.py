"""`ModelCheckpoint` in a job of two workers: its files hold the rows and weights of the version it was called at."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest

from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.engine import MemoryStore
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.checkpoints.restoring import restore_tables
from tests.elastable.callbacks import freezing_job
from tests.elastable.processes import run_elastable

HOME = Path(__file__).parent
VERSIONS = 4  # of an epoch


def test_its_files_hold_what_the_checkpoints_of_their_versions_hold(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        f"import sys\nsys.path.insert(0, {str(HOME)!r})\nimport keras\n"
        "from freezing_job import data, model\n"
        "def callbacks():\n"
        "    kinds = keras.callbacks\n"
        f"    best = kinds.ModelCheckpoint({str(tmp_path / 'best.weights.h5')!r}, 'loss', save_best_only=True,\n"
        "        save_weights_only=True)\n"
        f"    return [kinds.ModelCheckpoint({str(tmp_path)!r} + '/{{epoch}}.keras'), best]\n"
    )
    ran = run_elastable(
        "train", job, "--epochs", "2", "--micro-batch-size", "8", "--workers", "2", "--no-export", "--deadline", "60",
        "--checkpoint-dir", tmp_path / "saved", "--checkpoint-every", str(VERSIONS), "--keep", "0",
        "--run-dir", tmp_path / "runs",
    )  # fmt: skip
    assert ran.code == 0, f"{ran.out}\n{ran.err}"
    rows = {}
    best = freezing_job.model()
    best.optimizer.build(best.trainable_variables)  # the file holds its slots, too
    best.load_weights(tmp_path / "best.weights.h5")
    loaded = {1: keras.models.load_model(tmp_path / "1.keras"), 2: keras.models.load_model(tmp_path / "2.keras")}
    for epoch, model in loaded.items():
        saved = open_checkpoint(tmp_path / "saved" / f"ckpt-{epoch * VERSIONS:010d}")
        store = MemoryStore()
        restore_tables(saved, store)
        ids = np.arange(freezing_job.ROWS)
        rows[epoch] = store.lookup({"words": ids})["words"]
        assert rows[epoch] == pytest.approx(model.get_layer("words").read_rows(ids), abs=0)
        dense = saved.dense()
        trained = [dense[key] for key in sorted(dense) if key.startswith("variables/")]
        for weight, expected in zip(variables_of(model.trainable_weights), trained, strict=True):
            np.testing.assert_array_equal(weight, expected)
    assert np.abs(rows[1] - rows[2]).max() > 1e-3
    # The loss falls, so the last epoch is the best.
    np.testing.assert_array_equal(best.get_layer("words").read_rows(np.arange(freezing_job.ROWS)), rows[2])
