"""One trained job that many tests inspect."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from elastable.master.checkpoints.checkpoint import open_checkpoint
from tests.elastable.kept_jobs import assert_same
from tests.elastable.processes import CLICK_JOB, Finished, succeeded
from tests.once import once
from tests.untyped import Parsed

#: The job of every test that compares with `trained`: 20 versions to an epoch.
JOB = ("--epochs", "2", "--micro-batch-size", "32", "--grads-to-wait", "2", "--seed", "7")


@dataclass(frozen=True)
class Trained:
    """A finished `elastable train` and what it left behind."""

    ran: Finished
    home: Path
    run: Path
    checkpoint: Path

    @property
    def result(self) -> Parsed:
        found: Parsed = json.loads((self.run / "result.json").read_text())
        return found

    def require_same_numbers(self, checkpoint: str | Path) -> None:
        """Fails where another checkpoint of the job has any bit that is not this one's."""
        ours, theirs = open_checkpoint(checkpoint), open_checkpoint(self.checkpoint)
        assert ours.version == theirs.version
        assert_same(ours, theirs)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """`click_job` trained with two workers, without any accident."""
    return once(tmp_path_factory, "trained", _trained)


def _trained(home: Path) -> Trained:
    ran = succeeded("train", CLICK_JOB, "--workers", "2", *JOB, "--run-dir", home / "runs", "--deadline", "60")
    run = (home / "runs" / "latest").resolve()
    return Trained(ran, home, run, run / "checkpoints" / "ckpt-0000000040")
