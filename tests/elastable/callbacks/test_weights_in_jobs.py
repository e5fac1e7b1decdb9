"""What callbacks of a job do with `model.get_weights()`, `set_weights` and `weights` reaches the rows of its tables."""

from pathlib import Path

import keras
import numpy as np

from tests.elastable.callbacks import weights_job
from tests.elastable.processes import succeeded

JOB = Path(__file__).with_name("weights_job.py")


def test_callbacks_that_average_weights_average_the_rows(tmp_path: Path) -> None:
    options = ("--epochs", str(weights_job.EPOCHS), "--micro-batch-size", str(weights_job.RECORDS), "--workers", "1")
    succeeded("train", JOB, *options, "--deadline", "60", "--run-dir", tmp_path / "runs")
    ours = keras.models.load_model(next((tmp_path / "runs").rglob("model.keras")))
    plain = weights_job.program(keras.layers.Embedding)
    ids, y = weights_job.data("train")
    own = weights_job.callbacks()
    plain.fit(ids, y, batch_size=weights_job.RECORDS, epochs=weights_job.EPOCHS, verbose=0, callbacks=own)
    start = weights_job.program(keras.layers.Embedding).get_weights()
    assert len(ours.get_weights()) == 3
    for mine, expected, before in zip(ours.get_weights(), plain.get_weights(), start, strict=True):
        assert np.abs(expected - before).max() > 1e-3
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)
