"""The plan of a job: each record of each epoch in exactly one micro-batch, in an order that arguments alone decide."""

import itertools
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastable.embedding_store.errors import BadInput, BadSpec
from elastable.master.api import JobSpec, Task, TaskKind
from elastable.master.tasks.progress import Progress
from elastable.master.tasks.record_order import record_order
from elastable.master.tasks.schedule import Schedule
from tests.untyped import Keywords

jobs = st.builds(
    JobSpec,
    mode=st.sampled_from(["sync", "async"]),
    micro_batch_size=st.integers(1, 20),
    grads_to_wait=st.integers(1, 6),
    epochs=st.integers(1, 3),
    train_records=st.integers(1, 200),
    validation_records=st.integers(0, 50),
    evaluation_batch_size=st.integers(0, 7),
)

jobs_in_steps = st.builds(
    JobSpec,
    micro_batch_size=st.integers(1, 20),
    grads_to_wait=st.integers(1, 6),
    epochs=st.integers(3, 9),
    initial_epoch=st.integers(0, 2),
    train_records=st.integers(1, 100),
    steps_per_epoch=st.integers(1, 12),
)


@given(jobs)
def test_each_record_of_each_epoch_lies_in_exactly_one_micro_batch(job: JobSpec) -> None:
    """A version never spans epochs, and only an epoch's last is small."""
    schedule = Schedule(job)
    seen: dict[int, list[int]] = {epoch: [] for epoch in range(job.epochs)}
    numbers = []
    for version in range(schedule.versions_total):
        tasks = schedule.tasks(version)
        assert len(tasks) == schedule.group or schedule.ends_epoch(version + 1)
        for task in tasks:
            assert (task.version, task.kind, task.epoch) == (version, TaskKind.TRAIN, schedule.epoch(version))
            assert 1 <= task.stop - task.start <= job.micro_batch_size
            assert task == schedule.task(version, task.micro_batch)
            seen[task.epoch] += range(task.start, task.stop)
            numbers.append(task.micro_batch)
        assert schedule.records_before(version + 1) == sum(map(len, seen.values()))
    assert numbers == list(range(job.epochs * schedule.micro_batches_per_pass))
    assert all(positions == list(range(job.train_records)) for positions in seen.values())


@given(jobs)
def test_evaluation_covers_the_validation_split_once(job: JobSpec) -> None:
    schedule = Schedule(job)
    version = schedule.steps_per_epoch
    tasks = [schedule.evaluation(version, number) for number in range(schedule.evaluation_tasks)]
    positions = [position for task in tasks for position in range(task.start, task.stop)]
    assert positions == list(range(job.validation_records))
    assert all(task.stop - task.start <= (job.evaluation_batch_size or job.micro_batch_size) for task in tasks)
    assert all((task.kind, task.epoch) == (TaskKind.EVALUATE, 0) for task in tasks)
    assert all(task < schedule.task(version, 0) for task in tasks)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 4), st.integers(1, 3),
    st.sampled_from(["sync", "async"]),
)  # fmt: skip
def test_parts_are_jobs_that_continue_each_other(
    parts: list[int], size: int, group: int, epochs: int, mode: str
) -> None:
    one = JobSpec(
        mode=mode,
        micro_batch_size=size,
        grads_to_wait=group,
        train_records=sum(parts),
        parts=tuple(parts),
        epochs=epochs,
    )
    whole, before, found = Schedule(one), Keywords(), list[Task]()
    for records in parts * epochs:
        day = Schedule(replace(one, epochs=1, train_records=records, parts=(), **before))
        for version in range(day.job.versions_before, day.versions_total):
            assert day.records_before(version + 1) <= records
            found += day.tasks(version)
        before = day.before_next(Progress(day.versions_total, epoch=1))
    assert found == [task for version in range(whole.versions_total) for task in whole.tasks(version)]
    assert before == whole.before_next(Progress(whole.versions_total, epoch=epochs))
    ends = [version for version in range(whole.versions_total + 1) if whole.ends_part(version)]
    assert len(ends) == len(parts) * epochs
    assert all(whole.ends_epoch(version) == ((number + 1) % len(parts) == 0) for number, version in enumerate(ends))


def test_an_interrupted_job_is_continued_behind_what_it_has_trained() -> None:
    schedule = Schedule(JobSpec(micro_batch_size=2, grads_to_wait=2, train_records=16, epochs=2))
    assert schedule.before_next(Progress()) == {"versions_before": 0, "parts_before": 0, "micro_batches_before": 0}
    assert schedule.before_next(Progress(3)) == {"versions_before": 3, "parts_before": 1, "micro_batches_before": 6}
    assert schedule.before_next(Progress(6))["parts_before"] == 2


def test_parts_without_records_are_refused() -> None:
    with pytest.raises(BadSpec, match="must each hold a record, and together 5"):
        JobSpec(train_records=5, parts=(5, 0))


def test_a_job_without_records_is_refused() -> None:
    with pytest.raises(BadInput, match="no training records"):
        Schedule(JobSpec(train_records=0))


@given(jobs_in_steps)
def test_epochs_of_steps_go_on_where_they_ended_and_end_with_a_pass(job: JobSpec) -> None:
    """Batches are those of whole passes; an epoch takes `steps_per_epoch` of them, or what is left of its pass."""
    schedule = Schedule(job)
    expected = []  # (epoch, step, pass) of each version, as `model.fit` of arrays would go
    number, place = job.initial_epoch, 0
    for epoch in range(job.initial_epoch, job.epochs):
        assert schedule.first_version(epoch) == number * schedule.versions_per_pass + place
        for step in range(job.steps_per_epoch):
            expected.append((epoch, step, number))
            place += 1
            if place == schedule.versions_per_pass:
                number, place = number + 1, 0
                break
    begin = job.initial_epoch * schedule.versions_per_pass
    versions = range(begin, schedule.versions_total)
    found = [
        (schedule.epoch(version), schedule.step(version), schedule.tasks(version)[0].epoch) for version in versions
    ]
    assert found == expected
    ends = {version for version in versions if schedule.ends_epoch(version + 1)}
    last = {version for version, after in pairwise(versions) if schedule.step(after) == 0}
    assert ends == last | {versions[-1]}


blocks = st.one_of(st.none(), st.integers(1, 40))


@given(st.integers(0, 300), st.integers(0, 3), st.integers(-(2**63), 2**63 - 1), st.booleans(), blocks)
def test_every_record_once_in_any_cuts(records: int, epoch: int, seed: int, shuffle: bool, block: int | None) -> None:
    order = record_order(records, epoch, seed, shuffle, block)
    whole = order.take(0, records)
    assert whole.dtype == np.int64
    assert sorted(whole.tolist()) == list(range(records))
    cuts = [*range(0, records, 7), records]
    pieces = [order.take(start, stop) for start, stop in itertools.pairwise(cuts)]
    assert np.concatenate([np.empty(0, np.int64), *pieces]).tolist() == whole.tolist()
    if not shuffle:
        assert whole.tolist() == list(range(records))


def test_epochs_and_seeds_differ() -> None:
    orders = {
        tuple(record_order(50, epoch, seed, True, block).take(0, 50))
        for epoch in range(3)
        for seed in (0, 1, -1)
        for block in (None, 8)
    }
    assert len(orders) == 18


def test_blocks_stay_together() -> None:
    positions = record_order(100, 0, 5, True, 10).take(0, 100)
    blocks = (positions // 10).reshape(10, 10)
    assert (blocks == blocks[:, :1]).all()
    assert not np.array_equal(positions, np.sort(positions))


def test_the_order_is_pinned() -> None:
    """In every process: a change of these numbers would silently change what every resumed job trains on."""
    assert record_order(8, 0, 0, True, None).take(0, 8).tolist() == [0, 3, 7, 5, 1, 2, 6, 4]
    assert record_order(8, 2, 9, True, 3).take(0, 8).tolist() == [7, 6, 5, 4, 3, 0, 1, 2]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 11)])
@pytest.mark.parametrize("arguments", [(True, None), (True, 3), (False, None)])
def test_positions_outside_are_refused(start: int, stop: int, arguments: tuple[bool, int | None]) -> None:
    with pytest.raises(BadInput, match="do not lie within 10 records"):
        record_order(10, 0, 0, *arguments).take(start, stop)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(BadInput, match="block must be"):
        record_order(10, 0, 0, True, 0)
    with pytest.raises(BadInput, match="must not be negative"):
        record_order(-1, 0, 0, True, None)
