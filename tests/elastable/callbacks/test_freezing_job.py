"""Callbacks of a job freeze layers and assign weights: its workers hold to it, and so does a job that goes on."""

from pathlib import Path

import numpy as np

import elastable as et
from tests.elastable.callbacks import freezing_job as job
from tests.elastable.kept_jobs import assert_same, kept, killed_at, store_of, trained
from tests.untyped import Keyword

VERSIONS = 4  # of an epoch


def test_workers_hold_to_what_callbacks_freeze(tmp_path: Path) -> None:
    sizes = ("--epochs", str(job.EPOCHS), "--micro-batch-size", str(job.BATCH), "--workers", "1")
    options = (*sizes, "--no-lazy", "--checkpoint-every", str(VERSIONS))
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    trained(job.__file__, whole, *options)
    ids = np.arange(job.ROWS)
    stores = [store_of(kept(whole, epoch * VERSIONS)) for epoch in range(1, job.EPOCHS + 1)]
    rows = [store.lookup({"words": ids})["words"] for store in stores]
    np.testing.assert_array_equal(rows[1], rows[0])
    np.testing.assert_array_equal(rows[2], rows[0])
    assert np.abs(rows[3] - rows[0]).min(axis=1).max() > 1e-3

    # Resumed in the second of the frozen epochs, before the callback sets anything again.
    killed_at(2 * VERSIONS, whole, resumed)
    assert "resuming at version 8" in trained(job.__file__, resumed, *options, "--resume")
    assert_same(kept(whole), kept(resumed))

    # In one process, which test_freezing.py and tests/keras_table compare with Keras.
    model = job.model()
    settings: dict[str, Keyword] = {"epochs": job.EPOCHS, "batch_size": job.BATCH, "lazy": False, "verbose": False}
    et.fit(model, job.data("train"), callbacks=job.callbacks(), **settings)
    np.testing.assert_allclose(rows[-1], model.get_layer("words").read_rows(ids), rtol=1e-5, atol=1e-6)
