"""Hooks that are called again when a job goes on assign nothing twice, and those that were not yet called assign it."""

from pathlib import Path

import pytest

from tests.elastable.kept_jobs import assert_same, kept, trained

JOB = Path(__file__).with_name("rates_job.py")
VERSIONS = 12  # three epochs of four


def train(home: Path, *more: str, stops_after: int = 0) -> str:
    options = ("--epochs", "3", "--micro-batch-size", "16", "--workers", "1", *more)
    return trained(JOB, home, *options, env={"STOPS_AFTER": str(stops_after)}, code=130 if stops_after else 0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("whole")
    assert "failed" not in train(home)  # nor have workers that leave once all is trained
    return home


@pytest.mark.parametrize("version", [3, 4, 6])  # before the last batch of an epoch, after it, and within one
@pytest.mark.parametrize("log", [False, True])  # it goes on from a checkpoint, or from the record of its store
def test_numbers_of_a_job_that_never_stopped(whole: Path, tmp_path: Path, version: int, log: bool) -> None:
    store = ("--store", f"memory?log={tmp_path / 'log'}") if log else ()
    train(tmp_path, *store, stops_after=version)
    assert f"resuming at version {version}" in train(tmp_path, *store, "--resume")
    assert_same(kept(tmp_path, VERSIONS), kept(whole, VERSIONS))
