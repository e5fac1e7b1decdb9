"""Callbacks of jobs: what they keep, freeze, assign and write is what checkpoints hold, also of a job that goes on."""

import shutil
from pathlib import Path

import keras
import numpy as np
import pytest

import elastable as et
from elastable.embedding_store.contract.row_source import variables_of
from elastable.master.checkpoints.checkpoint import Checkpoint
from tests.elastable.callbacks import freezing_job
from tests.elastable.kept_jobs import assert_same, kept, killed_at, refusal, store_of, trained
from tests.untyped import Keywords

HOME = Path(__file__).parent
BEST = HOME / "best_weights_job.py"
VERSIONS = 4  # of an epoch
IDS = np.arange(freezing_job.ROWS)
OPTIONS = ("--epochs", "6", "--micro-batch-size", "16", "--workers", "1", "--checkpoint-every", "2")


def content(checkpoint: Checkpoint) -> dict[str, bytes]:
    rows = store_of(checkpoint).lookup({"words": IDS})["words"]
    kinds = ("variables", "states")
    dense = {key: value.tobytes() for key, value in checkpoint.dense().items() if key.split("/")[0] in kinds}
    return {"rows": rows.tobytes(), **dense}


def test_the_best_version_is_what_a_job_ends_with(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    trained(BEST, whole, *OPTIONS)
    best = content(kept(whole, VERSIONS))
    assert kept(whole).version == 4 * VERSIONS
    assert content(kept(whole)) == best
    assert content(kept(whole, 3 * VERSIONS)) != best

    killed_at(2 * VERSIONS, whole, resumed)
    shutil.rmtree(whole)
    assert "resuming at version 8" in trained(BEST, resumed, *OPTIONS, "--resume")
    assert content(kept(resumed)) == best


def test_a_store_that_a_job_is_resumed_from_is_refused(tmp_path: Path, redis_url: str) -> None:
    message = refusal(BEST, tmp_path, *OPTIONS, "--checkpoint-dir", tmp_path / "saved", "--store", redis_url)
    assert "EarlyStopping(restore_best_weights=True): the store keeps a record" in message


def test_keras_backups_are_refused(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        f"import sys\nsys.path.insert(0, {str(HOME)!r})\nimport keras\n"
        "from freezing_job import data, model\n"
        "def callbacks():\n    return [keras.callbacks.BackupAndRestore('anywhere')]\n"
    )
    assert "backed up and resumed by --checkpoint-dir and --resume" in refusal(job, tmp_path)


def test_workers_hold_to_what_callbacks_freeze(tmp_path: Path) -> None:
    sizes = ("--epochs", str(freezing_job.EPOCHS), "--micro-batch-size", str(freezing_job.BATCH), "--workers", "1")
    options = (*sizes, "--no-lazy", "--checkpoint-every", str(VERSIONS))
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    trained(freezing_job.__file__, whole, *options)
    stores = [store_of(kept(whole, epoch * VERSIONS)) for epoch in range(1, freezing_job.EPOCHS + 1)]
    rows = [store.lookup({"words": IDS})["words"] for store in stores]
    np.testing.assert_array_equal(rows[1], rows[0])
    np.testing.assert_array_equal(rows[2], rows[0])
    assert np.abs(rows[3] - rows[0]).min(axis=1).max() > 1e-3

    # Resumed in the second of the frozen epochs, before the callback sets anything again.
    killed_at(2 * VERSIONS, whole, resumed)
    assert "resuming at version 8" in trained(freezing_job.__file__, resumed, *options, "--resume")
    assert_same(kept(whole), kept(resumed))

    # In one process, which test_freezing.py and tests/keras_table compare with Keras.
    model = freezing_job.model()
    settings: Keywords = {"epochs": freezing_job.EPOCHS, "batch_size": freezing_job.BATCH}
    et.fit(model, freezing_job.data("train"), callbacks=freezing_job.callbacks(), lazy=False, verbose=False, **settings)
    np.testing.assert_allclose(rows[-1], model.get_layer("words").read_rows(IDS), rtol=1e-5, atol=1e-6)


def test_files_of_model_checkpoint_hold_what_the_checkpoints_of_their_versions_hold(tmp_path: Path) -> None:
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
        rows[epoch] = store_of(saved).lookup({"words": IDS})["words"]
        assert rows[epoch] == pytest.approx(model.get_layer("words").read_rows(IDS), abs=0)
        dense = saved.dense()
        expected = [dense[key] for key in sorted(dense) if key.startswith("variables/")]
        for weight, saved_one in zip(variables_of(model.trainable_weights), expected, strict=True):
            np.testing.assert_array_equal(weight, saved_one)
    assert np.abs(rows[1] - rows[2]).max() > 1e-3
    # The loss falls, so the last epoch is the best.
    np.testing.assert_array_equal(best.get_layer("words").read_rows(IDS), rows[2])
