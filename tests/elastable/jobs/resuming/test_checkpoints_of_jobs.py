"""Two jobs and one directory of checkpoints: a job's newest checkpoint is its own, whatever another one has written."""

import logging
from pathlib import Path

import pytest

from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadInput, CheckpointError
from elastable.jobs.options import JobOptions
from elastable.jobs.prepare import prepare_job
from elastable.master.api import JobSpec
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.checkpoints.storage.checkpoint_locations import claimed_checkpoints
from elastable.master.checkpoints.writing import write_checkpoint
from tests.elastable.processes import CLICK_JOB, run_elastable, succeeded
from tests.master.checkpoints.jobs import created, dense_of, flip, progress_of, train
from tests.untyped import Keywords


def written(home: Path, job: str, *versions: int) -> None:
    with MemoryStore(1) as store:
        created(store)
        for version in versions:
            train(store, version - store.version())
            write_checkpoint(home, store, dense_of(version), JobSpec(job=job), progress_of(version))


def test_the_newest_is_of_the_job_that_wrote_last(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path, "long", 4, 9)
    written(tmp_path, "short", 2, 3)
    with caplog.at_level(logging.WARNING):
        found = open_checkpoint(tmp_path)
    assert (found.version, found.job["job"]) == (3, "short")
    assert "taken is ckpt-0000000003 of job short, which wrote last, and none of long" in caplog.text
    caplog.clear()
    assert open_checkpoint(tmp_path / "ckpt-0000000009").version == 9
    assert not caplog.messages


def test_an_older_one_is_suggested_of_the_same_job_alone(tmp_path: Path) -> None:
    written(tmp_path, "long", 4)
    written(tmp_path, "short", 2, 6)
    found = open_checkpoint(tmp_path / "ckpt-0000000006")
    flip(next((tmp_path / "ckpt-0000000006").glob("table-*")))
    with pytest.raises(CheckpointError, match=r"an older .* is intact: .*ckpt-0000000002 \(version 2\)$"):
        found.verify()


def test_a_new_job_does_not_write_beside_another_one(tmp_path: Path) -> None:
    options: Keywords = {"model_file": CLICK_JOB, "micro_batch_size": 64, "checkpoint_dir": tmp_path / "saved"}
    with (first := prepare_job(JobOptions(**options))).store as store:
        write_checkpoint(tmp_path / "saved", store, first.dense.tensors(), first.job, first.progress)
    with pytest.raises(BadInput, match=f"holds checkpoints of job {first.job.job} .* --resume, give this one another"):
        prepare_job(JobOptions(**options))
    with (again := prepare_job(JobOptions(**options, resume=True))).store:
        assert again.job.job == first.job.job
    with (new := prepare_job(JobOptions(**options, overwrite=True))).store:
        assert new.job.job != first.job.job


def test_one_of_two_jobs_that_start_in_an_empty_directory_is_refused(tmp_path: Path) -> None:
    words = ("train", CLICK_JOB, "--micro-batch-size", "512", "--run-dir", tmp_path / "runs", "--workers", "1")
    with claimed_checkpoints(tmp_path / "saved"):
        for more in ((), ("--resume",)):
            ended = run_elastable(*words, "--checkpoint-dir", tmp_path / "saved", *more)
            assert ended.code == 3, ended.err
            assert "another job that runs now writes its checkpoints there" in " ".join(ended.err.split())
    with claimed_checkpoints(tmp_path / "saved"):
        pass


def test_a_command_says_which_checkpoint_it_took(tmp_path: Path) -> None:
    words = ("train", CLICK_JOB, "--micro-batch-size", "512", "--workers", "1", "--no-export", "--deadline", "60")
    succeeded(*words, "--run-dir", tmp_path / "runs", "--checkpoint-dir", tmp_path / "saved")
    saved = open_checkpoint(tmp_path / "saved")
    warm = run_elastable(*words, "--run-dir", tmp_path / "runs", "--warm-start", tmp_path / "saved")
    assert f"beginning with rows from {saved.address} of job {saved.job['job']}, version {saved.version}" in warm.out
