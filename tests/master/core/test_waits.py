"""Whoever waits at a master is answered by what happens, in order, and by nothing else."""

import gc
import weakref
from concurrent.futures import Future
from contextlib import ExitStack

import pytest

from elastable.embedding_store.errors import NotJoined
from elastable.master.api import Lease, Task, WorkerIdentity
from elastable.master.master_options import MasterOptions
from tests.master.core.test_core import Running
from tests.master.fakes import Bench

HOUR_S = 3_600.0
WAIT_S = 60.0


def waiting(job: Running, worker: str, want: int = 1) -> Future[Lease]:
    return job.master.lease_tasks_later(worker, want, HOUR_S, ())


def take_all(job: Running) -> list[Task]:
    """All tasks that there are before the first version is made."""
    tasks: list[Task] = []
    while more := job.master.lease_tasks("me", 100, 0.0).tasks:
        tasks += more
    return sorted(tasks)


def job_session(job: Running, name: str) -> ExitStack:
    held = ExitStack()
    held.callback(job.master.join(WorkerIdentity(name)).close)
    return held


@pytest.fixture
def job(held: ExitStack) -> Running:
    """Its tasks are all taken, and "you" has joined."""
    job = held.enter_context(Running(Bench()))
    take_all(job)
    held.enter_context(job_session(job, "you"))
    return job


def test_who_has_waited_longest_is_given_tasks_first_and_the_others_wait_on(held: ExitStack) -> None:
    job = held.enter_context(Running(Bench(options=MasterOptions(look_ahead=0))))
    take_all(job)
    for name in ("first", "second", "third"):
        held.enter_context(job_session(job, name))
    waits = [waiting(job, name) for name in ("first", "second", "third")]
    assert not any(wait.done() for wait in waits)
    job.session.close()  # two tasks are free
    assert [task.micro_batch for wait in waits[:2] for task in wait.result(WAIT_S).tasks] == [0, 1]
    assert not waits[2].done()


def test_a_wait_ends_with_its_session_and_with_the_next_wait() -> None:
    with Running(Bench()) as job:
        take_all(job)
        with job_session(job, "you"):
            first = waiting(job, "you")
            second = waiting(job, "you")
            assert first.result(WAIT_S) == Lease()
            assert not second.done()
        with pytest.raises(NotJoined):
            second.result(WAIT_S)


def test_a_worker_that_waits_for_a_version_hears_of_a_task_that_it_can_do_before(job: Running) -> None:
    wait = waiting(job, "you")
    version = job.master.pull_dense_later("you", 1, HOUR_S)
    job.session.close()  # its tasks of version 0 are free
    assert min(task.version for task in wait.result(WAIT_S).tasks) == 0
    assert version.result(WAIT_S) is None


def test_a_wait_that_is_over_leaves_nothing_for_the_collector(job: Running) -> None:
    gc.disable()
    try:
        tasks, version = waiting(job, "you"), job.master.pull_dense_later("you", 1, HOUR_S)
        freed: list[str] = []
        weakref.finalize(tasks, freed.append, "tasks")
        weakref.finalize(version, freed.append, "version")
        del tasks, version
        assert not freed
        job.session.close()  # both end: there is a task that comes before that version
        assert sorted(freed) == ["tasks", "version"]
    finally:
        gc.enable()


def test_a_cancelled_wait_takes_no_tasks(job: Running, held: ExitStack) -> None:
    held.enter_context(job_session(job, "them"))
    gone, there = waiting(job, "you", 2), waiting(job, "them", 2)
    assert gone.cancel()
    job.session.close()
    assert len(there.result(WAIT_S).tasks) == 2


def test_all_waits_end_with_the_job(job: Running) -> None:
    wait = waiting(job, "you")
    job.master.stop("enough")
    assert wait.result(WAIT_S).finished
    assert job.master.ended().result(WAIT_S).startswith(("the job finished", "the job stopping"))
