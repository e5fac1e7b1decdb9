"""Hooks that are called again when a job goes on assign nothing twice, and those that were not yet called assign it."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.checkpoints.comparing import compare_dense, compare_tables
from tests.elastable.processes import Finished, run_elastable

JOB = Path(__file__).with_name("rates_job.py")
VERSIONS = 12  # three epochs of four


def train(home: Path, *more: str, stops_after: int = 0) -> Finished:
    options = ("--epochs", "3", "--micro-batch-size", "16", "--workers", "1", "--no-export", "--deadline", "60")
    saving = ("--checkpoint-dir", home / "saved", "--run-dir", home / "runs")
    ran = run_elastable("train", JOB, *options, *saving, *more, env={"STOPS_AFTER": str(stops_after)})
    assert ran.code == (130 if stops_after else 0), f"{ran.out}\n{ran.err}"
    return ran


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """A job that nothing happened to."""
    home = tmp_path_factory.mktemp("whole")
    return home, train(home)


@pytest.mark.parametrize("version", [3, 4, 6])  # before the last batch of an epoch, after it, and within one
@pytest.mark.parametrize("log", [False, True])  # it goes on from a checkpoint, or from the record of its store
def test_numbers_of_a_job_that_never_stopped(
    whole: tuple[Path, Finished], tmp_path: Path, version: int, log: bool
) -> None:
    store = ("--store", f"memory?log={tmp_path / 'log'}") if log else ()
    train(tmp_path, *store, stops_after=version)
    assert f"resuming at version {version}" in train(tmp_path, *store, "--resume").out
    one, other = (open_checkpoint(home / "saved" / f"ckpt-{VERSIONS:010d}") for home in (tmp_path, whole[0]))
    assert compare_dense(one, other) == []
    assert all(table.same for table in compare_tables(one, other))


def test_workers_that_leave_once_all_is_trained_have_not_failed(whole: tuple[Path, Finished]) -> None:
    assert "failed" not in whole[1].out + whole[1].err
