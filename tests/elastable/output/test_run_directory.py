"""A run directory on a disk that is full for a while."""

from __future__ import annotations

import json
import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastable.embedding_store.errors import BadInput
from elastable.output.run_directory import RunDirectory

LAST = 1_900


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process can grow, as where there is no room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_cannot_be_noted_is_left_out_and_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunDirectory.create(tmp_path)
    run.record("train", 1, 0, {"loss": 3.0})
    with caplog.at_level(logging.WARNING), full_disk():
        for version in range(2, LAST):  # more than is buffered anywhere
            run.record("train", version, 0, {f"metric_{number}": 0.5 for number in range(4)})
    run.record("train", LAST, 0, {"loss": 1.0})
    run.finish({"version": LAST})
    assert [record.message for record in caplog.records if str(run.path) in record.message] == [
        f"metrics are not noted in {run.path} for now: [Errno 27] File too large"
    ]
    assert json.loads((run.path / "result.json").read_text()) == {"version": LAST}
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["version"] == 1
    assert json.loads(lines[-1])["version"] == LAST
    assert (run.path / "learning_curve.png").stat().st_size > 0


def test_a_result_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path)
    with full_disk(), pytest.raises(BadInput, match=f"run directory {run.path} cannot be written"):
        run.finish({"version": 40})
    run.close()


def test_a_run_that_begins_on_a_full_disk_is_refused_by_name(tmp_path: Path) -> None:
    """TensorBoard's file is the first that is written to."""
    with full_disk(), pytest.raises(BadInput, match=rf"run directory {tmp_path}/\S+ cannot be written.*tensorboard"):
        RunDirectory.create(tmp_path)
    RunDirectory.create(tmp_path).close()
