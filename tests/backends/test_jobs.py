"""Jobs whose processes have one backend and no other framework: one worker or two, killed, resumed, and carried over.

Dropout and BatchNormalization are in the model where bits are compared on one backend; two backends draw differently.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from elastable.master.checkpoints.checkpoint import open_checkpoint
from tests.elastable.processes import succeeded
from tests.equality.jobs import MODEL, Numbers, Running, differing, train, trained_numbers
from tests.equality.test_store_servers import StoreProcess
from tests.preloaded.client import HERE, Interpreter

pytestmark = pytest.mark.process

KEPT = ("--checkpoint-every", "20", "--keep", "0")
HALF = 20  # of 50 versions
MODEL_OF_JOB = {"EQUALITY_OPTIMIZER": "adam", "EQUALITY_RANDOM": "0", "EQUALITY_VOCABULARY": "40"}


def job(home: Path, of: Interpreter, *options: str) -> Numbers:
    return train(home, 1, "adam", options=(*KEPT, *options), random=False, of=of)


@pytest.fixture(scope="module")
def of_tensorflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("tensorflow")
    job(home, HERE)
    return home


@pytest.fixture(scope="module")
def of_backend(backend: Interpreter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("backend")
    job(home, backend)
    return home


def assert_goes_on(whole: Path, home: Path, of: Interpreter) -> None:
    """From the checkpoint in the middle of a job another backend trains what the job itself did, but for rounding."""
    shutil.copytree(whole / "checkpoints", home / "checkpoints")
    for checkpoint in (home / "checkpoints").glob("ckpt-*"):
        if open_checkpoint(checkpoint).version > HALF:
            shutil.rmtree(checkpoint)
    ours, theirs = job(home, of, "--resume"), trained_numbers(whole / "checkpoints")
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        np.testing.assert_allclose(ours[name], expected, rtol=2e-3, atol=2e-5, err_msg=name)


def test_it_goes_on_from_a_checkpoint_of_tensorflow(backend: Interpreter, of_tensorflow: Path, tmp_path: Path) -> None:
    assert_goes_on(of_tensorflow, tmp_path, backend)


@pytest.mark.slow
def test_tensorflow_goes_on_from_its_checkpoint(of_backend: Path, tmp_path: Path) -> None:
    assert_goes_on(of_backend, tmp_path, HERE)


@pytest.mark.slow
def test_tensorflow_computes_the_same_from_its_checkpoint(backend: Interpreter, of_backend: Path) -> None:
    words = ("evaluate", MODEL, "--checkpoint", of_backend / "checkpoints", "--split", "train")
    here, there = (json.loads(succeeded(*words, env=MODEL_OF_JOB, of=of).out) for of in (HERE, backend))
    assert here["version"] == 50
    for name in ("loss", "mae"):
        assert here.pop(name) == pytest.approx(there.pop(name), rel=1e-5)
    assert here == there
    assert list((of_backend / "latest").glob("**/events.out.tfevents*"))


def test_a_killed_worker_and_a_killed_master_change_no_bit(backend: Interpreter, tmp_path: Path) -> None:
    """Two workers, one killed and replaced; then the master killed, and another one resumes its job; a store server."""

    def kill(job: Running) -> None:
        job.until_version(5)
        job.processes.pop(1).kill()
        job.start_worker()
        job.until_version(15)
        job.processes[0].kill()
        job.start_master("--resume", "--listen", job.address)

    # The model has a loss whose divisor can only be read from a graph.
    options = ("--average", "records", "--checkpoint-every", "10")
    alone = train(tmp_path / "alone", 1, "muon", options=options, of=backend)
    server = StoreProcess(tmp_path / "store.log", "memory", of=backend)
    try:
        there = [server.address]
        killed = train(tmp_path / "killed", 2, "muon", stores=there, during=kill, options=options, of=backend)
    finally:
        server.kill()
    assert differing(alone, killed) == []
