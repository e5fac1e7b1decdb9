"""`ModelCheckpoint` in a job of two workers: its files hold the rows and weights of the version it was called at."""

from pathlib import Path

import keras
import numpy as np
import pytest

from elastable.embedding_store.contract.row_source import variables_of
from tests.elastable.callbacks import freezing_job
from tests.elastable.kept_jobs import kept, store_of, trained

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
    options = ("--epochs", "2", "--micro-batch-size", "8", "--workers", "2", "--checkpoint-every", str(VERSIONS))
    trained(job, tmp_path, *options)
    rows = {}
    best = freezing_job.model()
    best.optimizer.build(best.trainable_variables)  # the file holds its slots, too
    best.load_weights(tmp_path / "best.weights.h5")
    loaded = {1: keras.models.load_model(tmp_path / "1.keras"), 2: keras.models.load_model(tmp_path / "2.keras")}
    for epoch, model in loaded.items():
        saved = kept(tmp_path, epoch * VERSIONS)
        ids = np.arange(freezing_job.ROWS)
        rows[epoch] = store_of(saved).lookup({"words": ids})["words"]
        assert rows[epoch] == pytest.approx(model.get_layer("words").read_rows(ids), abs=0)
        dense = saved.dense()
        expected = [dense[key] for key in sorted(dense) if key.startswith("variables/")]
        for weight, saved_one in zip(variables_of(model.trainable_weights), expected, strict=True):
            np.testing.assert_array_equal(weight, saved_one)
    assert np.abs(rows[1] - rows[2]).max() > 1e-3
    # The loss falls, so the last epoch is the best.
    np.testing.assert_array_equal(best.get_layer("words").read_rows(np.arange(freezing_job.ROWS)), rows[2])
