"""A job that is stopped and resumed ends with the numbers of one that ran through."""

import json
import shlex
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest

from elastable.embedding_store.errors import JobFailed
from elastable.jobs.worker_process import refuse_early_end
from elastable.master.api import JobStatus
from elastable.master.checkpoints.checkpoint import open_checkpoint
from tests.elastable.conftest import JOB, Trained
from tests.elastable.processes import CLICK_JOB, Hold, elastable, is_running, succeeded


def command_to_go_on(out: str) -> list[str]:
    """The words behind `elastable` of the command that an interrupted job shows."""
    (line,) = [line for line in out.splitlines() if line.startswith("elastable ")]
    return shlex.split(line)[1:]


def stopped_at(version: int, number: signal.Signals, home: Path, command: list[str], workers: int) -> list[str]:
    """Runs a command, sends it a signal at a version, and returns the command that it says goes on."""
    hold = Hold(home / f"hold-{version}", version)
    with elastable(home, *command, env=hold.environment, name=f"to-{version}") as train:
        hold.wait(train)
        children = train.children()
        assert len(children) == workers
        train.signal(number)
        hold.go()
        assert train.wait() == 130, train.err
        assert "stopping after this version" in train.out
    assert not any(is_running(pid) for pid in children)
    result = json.loads((home / "runs" / "latest" / "result.json").read_text())
    assert result["stopped"] in ("interrupted", "terminated")
    assert version <= result["version"] < 40
    assert f"{result['stopped']} at version {result['version']}; go on with:\n" in train.out
    again = command_to_go_on(train.out)
    saved = open_checkpoint(again[again.index("--checkpoint-dir") + 1]).address
    assert Path(saved).name == f"ckpt-{result['version']:010d}"
    return again


@pytest.mark.timeout(900)
def test_interrupted_twice_and_resumed_equals_uninterrupted(trained: Trained, tmp_path: Path) -> None:
    # In the middle of the first epoch, and of the second; with other numbers of workers than the whole run.
    first = ["train", str(CLICK_JOB), *JOB, "--deadline", "60", "--run-dir", str(tmp_path / "runs"), "--no-export"]
    second = stopped_at(7, signal.SIGINT, tmp_path, [*first, "--overwrite", "--workers", "2"], workers=2)
    assert "--overwrite" not in second
    third = stopped_at(27, signal.SIGTERM, tmp_path, [*second, "--workers", "1"], workers=1)
    assert third[third.index("--workers") + 1] == "1"
    with elastable(tmp_path, *third, name="to-the-end") as train:
        assert train.wait() == 0, train.err
        assert "resuming at version" in train.out
        assert "go on with" not in train.out
    checkpoints = third[third.index("--checkpoint-dir") + 1]
    trained.require_same_numbers(checkpoints)
    result = json.loads((tmp_path / "runs" / "latest" / "result.json").read_text())
    assert result["metrics"] == trained.result["metrics"]
    # There is nothing left to do: it says what there was.
    succeeded(*third)
    saved = json.loads((tmp_path / "runs" / "latest" / "result.json").read_text())
    assert (saved["version"], saved["examples"]) == (40, 0)
    assert saved["metrics"] == result["metrics"]
    assert saved["auc"] == result["auc"]


@pytest.mark.parametrize(("state", "stopped", "again"), [
    ("stopping", "terminated", True),
    ("finished", "interrupted", True),
    ("finished", "an administrator's reason", False),
    ("finished", "", False),
])  # fmt: skip
def test_a_worker_is_started_again_where_its_master_will_be(state: str, stopped: str, again: bool) -> None:
    ended = JobStatus("j", state, "sync", 8, 40, 0, 2, 64, {}, (), "memory", stopped=stopped)
    expected = pytest.raises(JobFailed, match=f"was {stopped} at version 8 of 40") if again else nullcontext()
    with expected:
        refuse_early_end(ended)
