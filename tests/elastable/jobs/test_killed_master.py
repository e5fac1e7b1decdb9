"""A job whose store outlives its master goes on there when the master is killed: nothing is lost, or trained twice."""

import json
import signal
from pathlib import Path

import pytest

from tests.elastable.conftest import JOB, Trained
from tests.elastable.processes import CLICK_JOB, Hold, elastable, is_running, run_elastable, succeeded, wait_until


# Over Redis and over files tests/chaos kills masters.
@pytest.mark.timeout(900)
def test_killed_twice_and_resumed_equals_undisturbed(trained: Trained, tmp_path: Path) -> None:
    """The rows were in memory alone there; no checkpoint is written here before the end."""
    checkpoints, store = tmp_path / "checkpoints", f"memory?log={tmp_path / 'log'}&log_bytes=200KiB"
    places = ("--store", store, "--run-dir", tmp_path / "runs", "--checkpoint-dir", checkpoints, "--resume")
    job = ("train", CLICK_JOB, *JOB, "--deadline", "60", "--no-export", "--evaluate-every", "8", *places)
    for version, workers in ((7, "2"), (28, "1")):
        hold = Hold(tmp_path / f"hold-{version}", version)
        with elastable(tmp_path, *job, "--workers", workers, env=hold.environment, name=f"to-{version}") as train:
            hold.wait(train)
            train.signal(signal.SIGKILL)
            train.wait()
        assert not checkpoints.exists() or not list(checkpoints.glob("ckpt-*"))
    other = run_elastable("train", CLICK_JOB, *JOB[:-1], "8", "--workers", "1", *places, "--deadline", "5")
    assert other.code != 0
    assert "seed was 7 and is 8" in other.err
    # Not finished yet, so --rerun changes nothing.
    last = succeeded(*job, "--workers", "2", "--rerun")
    assert "resuming at version 28" in last.out
    trained.require_same_numbers(next(checkpoints.glob("ckpt-*")))
    result = json.loads((tmp_path / "runs" / "latest" / "result.json").read_text())
    assert result["metrics"] == trained.result["metrics"]


@pytest.mark.timeout(600)
def test_what_a_killed_master_has_started_ends_with_it(tmp_path: Path) -> None:
    """And not after the deadline, for which workers elsewhere wait for another master."""
    hold = Hold(tmp_path / "hold", 3)
    words = ("train", CLICK_JOB, *JOB, "--workers", "1", "--stores", "1", "--deadline", "3600", "--no-export")
    with elastable(tmp_path, *words, "--run-dir", tmp_path / "runs", env=hold.environment, new=True) as train:
        hold.wait(train)
        started = train.children()
        assert len(started) == 2, train.err
        assert all(map(is_running, started))
        train.signal(signal.SIGKILL)
        train.wait()
        wait_until(lambda: not any(map(is_running, started)), "end of worker and store server", train, limit_s=120.0)
    run = (tmp_path / "runs" / "latest").resolve()
    assert "the master that started this worker has ended" in (run / "worker-0.log").read_text()
    assert "stopping after this version" in (run / "store-0.log").read_text()
