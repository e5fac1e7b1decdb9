"""A store that holds another job: in use, taken over, pinned by a master that died, or finished and run again."""

import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store.contract.row_data import Commit, RowBlock
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadInput
from elastable.jobs.options import JobOptions
from elastable.jobs.prepare import PreparedJob, prepare_job
from elastable.jobs.resuming.resume import JobStart
from elastable.master.api import JobSpec
from elastable.master.commits.dense_part import DensePart
from elastable.master.commits.version_record import VersionRecord, job_as_json
from elastable.master.tasks.progress import Progress
from elastable.master.tasks.schedule import Schedule
from elastable.process.exit_codes import ExitCode
from tests.elastable.conftest import JOB
from tests.elastable.processes import CLICK_JOB, Hold, elastable
from tests.untyped import Keywords

SPEC = TableSpec("t", 2, 10)


def left_behind() -> MemoryStore:
    """A store with a row at version 3."""
    store = MemoryStore(threads=1)
    store.create_table(SPEC)
    store.put("t", [RowBlock(np.array([4]), np.ones((1, 2), np.float32), np.empty((1, 0), np.float32))])
    store.reset_version(3)
    return store


def begin(store: MemoryStore) -> Progress:
    options = JobOptions(Path("job.py"), overwrite=True)
    return JobStart(options, JobSpec(), {"t": SPEC}, None).fill(store, DensePart()).progress  # type: ignore[arg-type]


def test_leases_of_the_dead_are_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with left_behind() as store:
        store.pin(lease_s=2.0)
        with caplog.at_level(logging.WARNING):
            assert begin(store) == Progress()
        assert (store.version(), store.row_count("t")) == (0, 0)
    (logged,) = [record.message for record in caplog.records if "pinned" in record.message]
    assert logged.startswith("versions 3 of the store are pinned")


def test_a_pin_that_lives_on_is_not_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastable.jobs.resuming.resume._PINS_END_S", 0.3)
    with left_behind() as store, store.pin(lease_s=600.0) as pin:
        with pytest.raises(BadInput, match="'t' cannot be dropped while versions are pinned"):
            begin(store)
        np.testing.assert_array_equal(pin.lookup({"t": np.array([4])})["t"], [[1.0, 1.0]])


def test_a_pin_that_is_released_is_not_waited_for_any_longer() -> None:
    with left_behind() as store:
        pin = store.pin(lease_s=600.0)
        releasing = threading.Timer(0.2, pin.close)
        releasing.start()
        begin(store)
        releasing.join(60)
        assert store.row_count("t") == 0


@pytest.mark.parametrize("beginning", [{"overwrite": True}, {"resume": True}])
def test_a_store_in_use_is_refused(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beginning: Keywords
) -> None:
    monkeypatch.setattr("elastable.jobs.store_watch._OWNER_LEAVES_S", 0.2)
    options: Keywords = {"model_file": CLICK_JOB, "run_dir": tmp_path, "store": redis_url}
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
        takes: Keywords = {"overwrite": True, "take_over": True}
        options: Keywords = {"model_file": CLICK_JOB, "run_dir": tmp_path, "store": redis_url, **takes}
        with prepare_job(JobOptions(**options)).store as taken:
            hold.go()
            assert first.wait() == ExitCode.STORE_FAILED, first.err
            assert taken.version() == 0
    assert f"was taken over, its owner is now process {os.getpid()} on" in first.err


def leave_at(prepared: PreparedJob, version: int) -> None:
    """Commits empty versions up to `version`, with the records that a master keeps."""
    for number in range(1, version + 1):
        record = VersionRecord(job_as_json(prepared.job), Progress(number), prepared.dense.tensors())
        prepared.store.commit(Commit(number, {}, number - 1, {}, record.to_bytes()))


@pytest.mark.parametrize(("before_the_end", "epochs", "begins_at"), [(0, 1, 0), (1, 1, -1), (0, 2, -1)])
def test_a_finished_job_makes_room_and_another_goes_on(
    redis_url: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    before_the_end: int,
    epochs: int,
    begins_at: int,
) -> None:
    resumes: Keywords = {"micro_batch_size": 64, "resume": True}
    options: Keywords = {"model_file": CLICK_JOB, "run_dir": tmp_path, "store": redis_url, **resumes}
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
