"""Callbacks of jobs: what they keep, freeze, assign and write is what checkpoints hold, also of a job that goes on."""

import shutil
from pathlib import Path

import keras
import numpy as np
import pytest

import elastable as et
from elastable.callbacks.callback_list import JobCallbacks
from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.errors import Unsupported
from elastable.embedding_store.open_store import open_store
from elastable.master.api import JobSpec
from elastable.master.checkpoints.checkpoint import Checkpoint
from elastable.master.model.dense import DenseState
from elastable.master.tasks.progress import Progress
from tests.elastable.callbacks import freezing_job
from tests.elastable.kept_jobs import assert_same, kept, killed_at, store_of, trained
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
    trained(BEST, whole, *OPTIONS, env={"KEPT_IN": str(whole)})
    best = content(kept(whole, VERSIONS))
    assert kept(whole).version == 4 * VERSIONS
    assert content(kept(whole)) == best
    assert content(kept(whole, 3 * VERSIONS)) != best
    assert_files_of_model_checkpoint(whole)

    killed_at(2 * VERSIONS, whole, resumed)
    shutil.rmtree(whole)
    assert "resuming at version 8" in trained(BEST, resumed, *OPTIONS, "--resume", env={"KEPT_IN": str(resumed)})
    assert content(kept(resumed)) == best


def assert_files_of_model_checkpoint(home: Path) -> None:
    """They hold what the checkpoints of their versions hold."""
    loaded = {epoch: keras.models.load_model(home / f"{epoch}.keras") for epoch in (1, 2, 4)}
    rows = {epoch: model.get_layer("words").read_rows(IDS) for epoch, model in loaded.items()}
    for epoch in (1, 2):
        saved = kept(home, epoch * VERSIONS)
        np.testing.assert_array_equal(store_of(saved).lookup({"words": IDS})["words"], rows[epoch])
        dense = saved.dense()
        expected = [dense[key] for key in sorted(dense) if key.startswith("variables/")]
        for weight, saved_one in zip(variables_of(loaded[epoch].trainable_weights), expected, strict=True):
            np.testing.assert_array_equal(weight, saved_one)
    assert np.abs(rows[1] - rows[2]).max() > 1e-3
    best = freezing_job.model()
    best.optimizer.build(best.trainable_variables)  # the file holds its slots, too
    best.load_weights(home / "best.weights.h5")
    np.testing.assert_array_equal(best.get_layer("words").read_rows(IDS), rows[4])  # the loss falls


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (
            keras.callbacks.EarlyStopping("loss", restore_best_weights=True),
            r"EarlyStopping\(restore_best_weights=True\): the store keeps a record",
        ),
        (keras.callbacks.BackupAndRestore("anywhere"), "backed up and resumed by --checkpoint-dir and --resume"),
    ],
)
def test_what_a_job_could_not_go_on_from_is_refused(
    callback: keras.callbacks.Callback, message: str, tmp_path: Path, redis_url: str
) -> None:
    model, job = freezing_job.model(), JobSpec(job="job", train_records=64)
    with open_store(redis_url) as store, pytest.raises(Unsupported, match=message):
        JobCallbacks([callback], model, DenseState(model), store, job, lambda: Progress(0), directory=str(tmp_path))


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
