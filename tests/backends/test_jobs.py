"""Jobs whose processes have one backend and no other framework: one worker or two, killed, resumed, and carried over.

Dropout and BatchNormalization are in the model where bits are compared on one backend. Without them the numbers of two
backends are the same but for rounding.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from elastable.master.checkpoints.checkpoint import open_checkpoint
from tests.backends.on_backend import OnBackend
from tests.elastable.processes import succeeded
from tests.equality.jobs import MODEL, Numbers, Running, differing, train, trained_numbers

pytestmark = pytest.mark.process

KEPT = ("--checkpoint-every", "20", "--keep", "0")
HALF = 20  # of 50 versions
PLAIN = {"EQUALITY_OPTIMIZER": "adam", "EQUALITY_RANDOM": "0", "EQUALITY_VOCABULARY": "40"}


def job(backend: OnBackend | None, home: Path, *options: str) -> Numbers:
    """One worker's, without random numbers; of TensorFlow where no backend is given."""
    python, environment = (None, {}) if backend is None else (backend.python, backend.environment)
    return train(home, 1, "adam", options=options, random=False, python=python, environment=environment)


def assert_close(ours: Numbers, theirs: Numbers) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        np.testing.assert_allclose(ours[name], expected, rtol=2e-3, atol=2e-5, err_msg=name)


@pytest.fixture(scope="module")
def of_tensorflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("tensorflow")
    job(None, home, *KEPT)
    return home


@pytest.fixture(scope="module")
def of_backend(backend: OnBackend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp(backend.name)
    job(backend, home, *KEPT)
    return home


def half_of(whole: Path, home: Path) -> None:
    """Makes `home` what `whole` was when the checkpoint in the middle was its last."""
    shutil.copytree(whole / "checkpoints", home / "checkpoints")
    for checkpoint in (home / "checkpoints").glob("ckpt-*"):
        if open_checkpoint(checkpoint).version > HALF:
            shutil.rmtree(checkpoint)


def test_a_checkpoint_of_tensorflow_is_gone_on_from(backend: OnBackend, of_tensorflow: Path, tmp_path: Path) -> None:
    half_of(of_tensorflow, tmp_path)
    assert_close(job(backend, tmp_path, *KEPT, "--resume"), trained_numbers(of_tensorflow / "checkpoints"))


def test_tensorflow_goes_on_from_a_checkpoint_of_it(of_backend: Path, tmp_path: Path) -> None:
    half_of(of_backend, tmp_path)
    assert_close(job(None, tmp_path, *KEPT, "--resume"), trained_numbers(of_backend / "checkpoints"))


def test_tensorflow_computes_the_same_from_its_checkpoint(backend: OnBackend, of_backend: Path, tmp_path: Path) -> None:
    words = (MODEL, "--checkpoint", of_backend / "checkpoints", "--split", "train")
    for place, python, environment in (("there", backend.python, backend.environment), ("here", None, {})):
        env = {**PLAIN, **environment}
        said = succeeded("evaluate", *words, env=env, python=python)
        (tmp_path / place).write_text(said.out)
    there, here = (json.loads((tmp_path / place).read_text()) for place in ("there", "here"))
    assert there["version"] == here["version"] == 50
    assert here == pytest.approx(there, rel=1e-5)
    assert list((of_backend / "latest").glob("**/events.out.tfevents*"))


def test_a_killed_worker_and_a_killed_master_change_no_bit(backend: OnBackend, tmp_path: Path) -> None:
    """Two workers, one killed and replaced; then the master killed, and another one resumes its job."""
    options = ("--average", "records", "--checkpoint-every", "10")

    def kill(job: Running) -> None:
        job.until_version(5)
        job.processes.pop(1).kill()
        job.start_worker()
        job.until_version(15)
        job.processes[0].kill()
        job.start_master("--resume", "--listen", job.address)

    running = {"python": backend.python, "environment": backend.environment, "options": options}
    alone = train(tmp_path / "alone", 1, "adagrad", **running)
    assert differing(alone, train(tmp_path / "killed", 2, "adagrad", during=kill, **running)) == []
