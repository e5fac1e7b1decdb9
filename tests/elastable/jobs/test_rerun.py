"""--resume --rerun: an unfinished job goes on, a finished one makes room for a new one."""

import logging

import pytest

from elastable.embedding_store.contract.row_data import Commit
from elastable.jobs.options import JobOptions
from elastable.jobs.prepare import PreparedJob, prepare_job
from elastable.master.commits.version_record import VersionRecord, job_as_json
from elastable.master.tasks.progress import Progress
from elastable.master.tasks.schedule import Schedule
from tests.elastable.processes import CLICK_JOB
from tests.untyped import Keywords


def leave_at(prepared: PreparedJob, version: int) -> None:
    """Commits empty versions up to `version`, with the records that a master keeps."""
    for number in range(1, version + 1):
        record = VersionRecord(job_as_json(prepared.job), Progress(number), prepared.dense.tensors())
        prepared.store.commit(Commit(number, {}, number - 1, {}, record.to_bytes()))


@pytest.mark.parametrize(("before_the_end", "epochs", "begins_at"), [(0, 1, 0), (1, 1, -1), (0, 2, -1)])
def test_a_finished_job_makes_room_and_another_goes_on(
    redis_url: str, caplog: pytest.LogCaptureFixture, before_the_end: int, epochs: int, begins_at: int
) -> None:
    options: Keywords = {"model_file": CLICK_JOB, "store": redis_url, "micro_batch_size": 64, "resume": True}
    with (first := prepare_job(JobOptions(**options))).store:
        last = Schedule(first.job).versions_total - before_the_end
        leave_at(first, last)
    with caplog.at_level(logging.WARNING):
        second = prepare_job(JobOptions(**options, rerun=True, epochs=epochs))
    with second.store as store:
        expected = last if begins_at < 0 else begins_at
        assert (second.progress.version, store.version()) == (expected, expected)
        assert (second.job.job == first.job.job) is (begins_at < 0)
    assert any("is finished" in message for message in caplog.messages) is (begins_at == 0)
