"""A run directory on a disk that is full for a while."""

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


def _run(home: Path, job: str, begun: int, versions: range, loss: float) -> RunDirectory:
    run = RunDirectory.create(home)
    run.begin_job(job, "127.0.0.1:1", begun)
    for version in versions:
        run.record("train", version, 0, {"loss": loss})
    return run


def test_a_resumed_job_has_the_curves_of_its_runs_each_up_to_where_the_next_one_went_on(tmp_path: Path) -> None:
    _run(tmp_path, "job", 0, range(1, 10), 9.0).close()
    _run(tmp_path, "another", 0, range(1, 20), 0.0).close()
    second = _run(tmp_path, "job", 4, range(5, 10), 5.0)
    with (second.path / "metrics.jsonl").open("a") as torn:
        torn.write('{"kind": "train", "version": 7, "los')
    second.close()
    third = _run(tmp_path, "job", 6, range(7, 8), 3.0)
    losses = [*((version, 9.0) for version in range(1, 5)), (5, 5.0), (6, 5.0), (7, 3.0)]
    assert third.curves.points() == {"loss": losses}
    third.close()
    anew = _run(tmp_path, "job", 0, range(1, 2), 1.0)
    assert anew.curves.points() == {"loss": [(1, 1.0)]}
    anew.close()


def test_what_is_no_run_of_ours_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, text in (("other", "[]"), ("broken", "{"), ("without", '{"job": "job", "version": 3}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.json").write_text(text)
    run = _run(tmp_path, "job", 6, range(7, 8), 3.0)
    assert run.curves.points() == {"loss": [(7, 3.0)]}
    assert sum("curves" in record.message for record in caplog.records) == 3
    run.close()


def test_a_job_that_cannot_be_noted_is_refused_by_name(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path)
    (run.path / "job.json").mkdir()
    with pytest.raises(BadInput, match=r"job\.json cannot be written: .*Is a directory"):
        run.begin_job("job", "127.0.0.1:1", 0)
    run.close()
