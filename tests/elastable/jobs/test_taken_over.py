"""A store in use is refused by name; taken with --take-over, the job that had it fails at once."""

import os
from pathlib import Path

import pytest

from elastable.embedding_store.errors import BadInput
from elastable.jobs.options import JobOptions
from elastable.jobs.prepare import prepare_job
from elastable.process.exit_codes import ExitCode
from tests.elastable.conftest import JOB
from tests.elastable.processes import CLICK_JOB, Hold, elastable
from tests.untyped import Keywords


@pytest.mark.parametrize("beginning", [{"overwrite": True}, {"resume": True}])
def test_a_store_in_use_is_refused(redis_url: str, monkeypatch: pytest.MonkeyPatch, beginning: Keywords) -> None:
    monkeypatch.setattr("elastable.jobs.resuming.resume._OWNER_LEAVES_S", 0.2)
    options: Keywords = {"model_file": CLICK_JOB, "store": redis_url}
    with prepare_job(JobOptions(**options)).store as running:
        running.reset_version(3)
        with pytest.raises(BadInput, match=rf"the store is in use: \S+:{os.getpid()} .*--take-over"):
            prepare_job(JobOptions(**options, **beginning))
        assert running.version() == 3
        assert sorted(running.specs()) == ["users", "words"]


def test_a_job_whose_store_is_taken_fails_at_once_by_name(redis_url: str, tmp_path: Path) -> None:
    """Long before its deadline: repeating the commit would never help."""
    hold = Hold(tmp_path / "hold", 7)
    where = ("--store", redis_url, "--run-dir", tmp_path / "runs", "--deadline", "100000", "--no-export")
    with elastable(tmp_path, "train", CLICK_JOB, *JOB, *where, env=hold.environment, name="first") as first:
        hold.wait(first)
        options: Keywords = {"model_file": CLICK_JOB, "store": redis_url, "overwrite": True, "take_over": True}
        with prepare_job(JobOptions(**options)).store as taken:
            hold.go()
            assert first.wait() == ExitCode.STORE_FAILED, first.err
            assert taken.version() == 0
    assert f"was taken over, its owner is now process {os.getpid()} on" in first.err
