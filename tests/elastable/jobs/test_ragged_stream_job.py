"""Ragged strings of a stream without an end: two workers, a resumed job, evaluation, predictions and lookups."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest

import elastable as et
from tests.elastable.jobs import ragged_stream_job as job
from tests.elastable.processes import succeeded

MODEL = Path(job.__file__)


@pytest.mark.slow
def test_a_job_trains_each_record_once_and_its_checkpoint_can_be_used(tmp_path: Path) -> None:
    saved, out = tmp_path / "saved", tmp_path / "predictions.npy"
    options = ("--micro-batch-size", "8", "--grads-to-wait", "1", "--seed", "3", "--run-dir", tmp_path / "runs")
    for epochs, more in (("1", ()), ("3", ("--resume",))):
        succeeded("train", MODEL, "--workers", "2", "--epochs", epochs, *options, "--checkpoint-dir", saved, *more)
    used = ("--checkpoint", saved)
    evaluated = succeeded("evaluate", MODEL, *used)
    succeeded("predict", MODEL, *used, "--output", out, "--batch-size", "7")
    found = succeeded("lookup", "items_table", "item 3", "item 999", *used)

    # As the job was: from one seed, in one process.
    keras.utils.set_random_seed(3)
    model, store, validation = job.model(), et.MemoryStore(), job.data("validation")
    source = et.EndlessReader(job.stream, job.STEPS)
    done = et.fit(model, source, epochs=3, seed=3, store=store, validation_data=validation, verbose=False)
    rows = store.lookup({"items_table": et.hash_ids(["item 3", "item 999"])})["items_table"]
    output = [json.loads(line) for line in found.out.splitlines()]
    assert [line["string"] for line in output] == ["item 3", "item 999"]
    np.testing.assert_allclose([line["row"] for line in output], rows, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(json.loads(evaluated.out)["loss"], done.history["val_loss"][-1], rtol=1e-4)
    assert np.load(out).shape == (3 * job.SIZE, 1)
