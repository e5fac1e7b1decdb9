"""The plan of a job: each record of each epoch in exactly one micro-batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastable.embedding_store.errors import BadInput
from elastable.master.api import JobSpec, TaskKind
from elastable.master.schedule import Schedule

jobs = st.builds(
    JobSpec,
    mode=st.sampled_from(["sync", "async"]),
    micro_batch_size=st.integers(1, 20),
    grads_to_wait=st.integers(1, 6),
    epochs=st.integers(1, 3),
    train_records=st.integers(1, 200),
    validation_records=st.integers(0, 50),
)


@given(jobs)
def test_each_record_of_each_epoch_lies_in_exactly_one_micro_batch(job: JobSpec) -> None:
    schedule = Schedule(job)
    seen: dict[int, list[int]] = {epoch: [] for epoch in range(job.epochs)}
    numbers = []
    for version in range(schedule.versions_total):
        for task in schedule.tasks(version):
            assert (task.version, task.kind, task.epoch) == (version, TaskKind.TRAIN, schedule.epoch(version))
            assert 1 <= task.stop - task.start <= job.micro_batch_size
            assert task == schedule.task(version, task.micro_batch)
            seen[task.epoch] += range(task.start, task.stop)
            numbers.append(task.micro_batch)
    assert numbers == list(range(job.epochs * schedule.micro_batches_per_epoch))
    assert all(positions == list(range(job.train_records)) for positions in seen.values())


@given(jobs)
def test_a_version_never_spans_epochs_and_only_an_epochs_last_is_small(job: JobSpec) -> None:
    schedule = Schedule(job)
    for version in range(schedule.versions_total):
        tasks = schedule.tasks(version)
        assert len({task.epoch for task in tasks}) == 1
        assert len(tasks) == schedule.group or schedule.ends_epoch(version + 1)
        trained = sum(task.stop - task.start for task in tasks)
        assert schedule.records_before(version + 1) - schedule.records_before(version) == trained


@given(jobs)
def test_evaluation_covers_the_validation_split_once(job: JobSpec) -> None:
    schedule = Schedule(job)
    version = schedule.versions_per_epoch
    tasks = [schedule.evaluation(version, number) for number in range(schedule.evaluation_tasks)]
    positions = [position for task in tasks for position in range(task.start, task.stop)]
    assert positions == list(range(job.validation_records))
    assert all((task.kind, task.epoch) == (TaskKind.EVALUATE, 0) for task in tasks)
    assert all(task < schedule.task(version, 0) for task in tasks)


def test_a_job_without_records_is_refused() -> None:
    with pytest.raises(BadInput, match="no training records"):
        Schedule(JobSpec(train_records=0))
