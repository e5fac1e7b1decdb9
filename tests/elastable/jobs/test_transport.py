"""Rows come to workers from the master's memory or over gRPC: the same bits."""

from pathlib import Path

from tests.elastable.conftest import JOB, Trained
from tests.elastable.processes import CLICK_JOB, succeeded

ATTACHED = "are read from its memory"
LAID_DOWN = "gradients are laid down in memory"


def logs(run: Path) -> list[str]:
    return [log.read_text() for log in sorted(run.glob("worker-*.log"))]


def test_a_job_over_grpc_gives_the_bits_of_one_from_shared_memory(trained: Trained, tmp_path: Path) -> None:
    assert len(logs(trained.run)) == 2
    assert all(ATTACHED in log and LAID_DOWN in log for log in logs(trained.run)), logs(trained.run)
    options = ("--transport", "grpc", "--run-dir", tmp_path, "--deadline", "60")
    succeeded("train", CLICK_JOB, "--workers", "1", *JOB, *options)
    run = (tmp_path / "latest").resolve()
    assert not any(ATTACHED in log or LAID_DOWN in log for log in logs(run))
    trained.require_same_numbers(run / "checkpoints")
