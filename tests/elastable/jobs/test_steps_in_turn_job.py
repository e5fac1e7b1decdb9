"""A job of a GAN with two workers: the numbers of plain Keras, also where it was killed in the middle of a step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store.engine import MemoryStore
from elastable.master.checkpoints.checkpoint import Checkpoint, open_checkpoint
from elastable.master.checkpoints.restoring import restore_tables
from tests.elastable import gan_job
from tests.elastable.processes import Finished, counted_by_workers, run_elastable

JOB = Path(gan_job.__file__)
EPOCHS, WAIT = 2, 2
VERSIONS = 2 * EPOCHS * gan_job.RECORDS // (gan_job.MICRO * WAIT)
"""Two to a step; checkpoints are those of every third."""


def train(home: Path, *more: str) -> Finished:
    options = ("--epochs", str(EPOCHS), "--micro-batch-size", str(gan_job.MICRO), "--grads-to-wait", str(WAIT))
    plainly = ("--no-shuffle", "--no-lazy", "--no-export", "--deadline", "60")
    saving = ("--checkpoint-every", "3", "--keep", "0", "--checkpoint-dir", str(home / "saved"))
    return run_elastable("train", JOB, *options, *plainly, *saving, "--run-dir", home / "runs", *more)


def content(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """All rows and dense weights."""
    store = MemoryStore()
    restore_tables(checkpoint, store)
    ids = np.arange(gan_job.LABELS)
    rows = {name: store.lookup({name: ids})[name] for name in store.specs()}
    return {**rows, **checkpoint.dense()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of two workers that nothing happened to."""
    home = tmp_path_factory.mktemp("whole")
    ran = train(home, "--workers", "2")
    assert ran.code == 0, f"{ran.out}\n{ran.err}"
    return home


def test_two_workers_train_a_gan_as_plain_keras(whole: Path) -> None:
    plain = gan_job.model(gan_job.in_keras, gan_job.in_turn_plainly)
    history = plain.fit(*gan_job.DATA, epochs=EPOCHS, batch_size=gan_job.MICRO * WAIT, shuffle=False, verbose=0)
    result = json.loads((whole / "runs" / "latest" / "result.json").read_text())
    assert result["version"] == VERSIONS
    assert result["examples"] == EPOCHS * gan_job.RECORDS
    assert result["metrics"] == pytest.approx({name: values[-1] for name, values in history.history.items()}, rel=1e-4)
    assert sum(counted_by_workers(whole / "runs" / "latest")) == 2 * EPOCHS * gan_job.RECORDS // gan_job.MICRO
    saved = content(open_checkpoint(whole / "saved" / f"ckpt-{VERSIONS:010d}"))
    tables = {weight.path.split("/")[0]: weight for weight in plain.weights if "embeddings" in weight.path}
    for name, weight in tables.items():
        np.testing.assert_allclose(saved[name], weight, rtol=1e-4, atol=1e-5, err_msg=name)
    others = [weight for weight in plain.weights if "embeddings" not in weight.path]
    for place, weight in enumerate(others):
        np.testing.assert_allclose(saved[f"variables/{place:05d}"], weight, rtol=1e-4, atol=1e-5, err_msg=weight.path)


def test_a_job_killed_between_the_turns_of_a_step_ends_with_the_same_bits(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "saved", tmp_path / "saved")
    for checkpoint in (tmp_path / "saved").glob("ckpt-*"):
        if checkpoint.name > f"ckpt-{9:010d}":
            shutil.rmtree(checkpoint)
    ran = train(tmp_path, "--resume", "--workers", "1")
    assert ran.code == 0, f"{ran.out}\n{ran.err}"
    assert "resuming at version 9" in ran.out
    last = f"ckpt-{VERSIONS:010d}"
    ours, theirs = (content(open_checkpoint(home / "saved" / last)) for home in (tmp_path, whole))
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        np.testing.assert_array_equal(ours[name], values, err_msg=name)


def test_turns_in_mode_async_are_refused(tmp_path: Path) -> None:
    ran = train(tmp_path, "--mode", "async", "--workers", "1")
    assert ran.code != 0
    assert "its train_step applies gradients in turn" in " ".join((ran.out + ran.err).split())
