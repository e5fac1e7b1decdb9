"""Leases: whatever workers do, every micro-batch is done once and the job ends."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastable.embedding_store.errors import NotJoined
from elastable.master.api import JobSpec, Task, TaskKind
from elastable.master.commits.push_protocol import AsyncPushes, SyncPushes
from elastable.master.master_options import MasterOptions
from elastable.master.tasks.progress import Progress
from elastable.master.tasks.schedule import Schedule
from elastable.master.tasks.task_board import TaskBoard


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def new_board(
    job: JobSpec,
    clock: Clock,
    backup_after: float | None = None,
    position: int = 0,
    done: tuple[int, ...] = (),
) -> TaskBoard:
    """The board of a job that begins, or goes on with its group `position`."""
    options = MasterOptions(lease_seconds=10.0, backup_after_s=backup_after)
    protocol = SyncPushes if job.mode == "sync" else AsyncPushes
    start = Progress(version=position, epoch=position, done=done)
    return protocol(Schedule(job), options, start, clock).board


def board_of(clock: Clock | None = None, **job: object) -> TaskBoard:
    spec = JobSpec(**{"micro_batch_size": 1, "grads_to_wait": 4, "train_records": 12, **job})  # type: ignore[arg-type]
    board = new_board(spec, clock or Clock())
    board.open()
    return board


def numbers(tasks: tuple[Task, ...]) -> list[int]:
    return [task.micro_batch for task in tasks]


def test_the_first_to_ask_does_not_get_everything() -> None:
    board = board_of()
    board.join("a")
    board.join("b")
    assert numbers(board.lease("a", 4, 0)) == [0, 1, 4, 5]
    assert numbers(board.lease("a", 4, 0)) == [8, 9]
    assert numbers(board.lease("b", 3, 0)) == [2, 3, 6]


def test_look_ahead_is_bounded() -> None:
    board = board_of(train_records=100)
    board.join("a")
    tasks = board.lease("a", 100, 0)
    assert {task.version for task in tasks} == {0, 1, 2, 3}
    assert len(tasks) == 16


def test_a_dead_workers_tasks_are_free_at_once() -> None:
    board = board_of()
    board.join("a")
    board.join("b")
    board.lease("a", 100, 0)
    board.lease("b", 100, 0)
    assert board.lease("b", 1, 0) == ()
    board.release("a")
    assert numbers(board.lease("b", 1, 0)) == [0]


def test_a_reissued_task_does_not_wait_behind_fetched_ones() -> None:
    board = board_of()
    board.join("a")
    board.join("b")
    board.lease("a", 2, 0)
    board.lease("b", 100, 0)
    board.complete(TaskKind.TRAIN, 2)
    board.complete(TaskKind.TRAIN, 3)
    board.release("a")
    assert numbers(board.lease("b", 0, 0)) == [0]
    board.complete(TaskKind.TRAIN, 0)
    assert numbers(board.lease("b", 0, 0)) == [1]


def test_a_stopped_workers_tasks_are_issued_again_after_the_lease() -> None:
    clock = Clock()
    board = board_of(clock, train_records=4)
    board.join("stopped")
    board.join("b")
    assert numbers(board.lease("stopped", 9, 0)) == [0, 1]
    assert numbers(board.lease("b", 9, 0)) == [2, 3]
    for number in (2, 3):
        clock.seconds += 6
        board.complete(TaskKind.TRAIN, number)
    assert numbers(board.lease("b", 9, 0)) == [0]
    assert board.complete(TaskKind.TRAIN, 0) == (True, "b")
    # The stopped one holds 1 for no longer because somebody else did 0.
    assert numbers(board.lease("b", 9, 0)) == [1]
    assert board.complete(TaskKind.TRAIN, 1)[0]
    assert board.complete(TaskKind.TRAIN, 0) == (False, None)
    assert board.training.current_done


def test_leases_of_fetched_tasks_do_not_run_before_their_version_is_open() -> None:
    clock = Clock()
    board = board_of(clock, grads_to_wait=2, train_records=4)
    board.join("a")
    board.join("b")
    board.lease("a", 9, 0)
    clock.seconds += 100
    board.complete(TaskKind.TRAIN, 0)
    board.lease("b", 9, 0)
    board.complete(TaskKind.TRAIN, 1)
    board.training.advance()
    board.open()
    clock.seconds += 5
    assert board.lease("b", 9, 1) == ()
    clock.seconds += 6
    assert numbers(board.lease("b", 9, 1)) == [2]


def test_a_worker_that_never_got_the_answer_is_served_again() -> None:
    clock = Clock()
    board = board_of(clock)
    board.join("a")
    lost = board.lease("a", 4, 0)
    clock.seconds += 11
    assert board.lease("a", 4, 0) == lost


def test_a_worker_must_join() -> None:
    with pytest.raises(NotJoined, match="'a' has not joined"):
        board_of().lease("a", 1, 0)


def test_async_tasks_come_in_order_and_stop_at_the_epochs_end() -> None:
    board = board_of(mode="async", train_records=3, epochs=2)
    board.join("a")
    assert numbers(board.lease("a", 9, 0)) == [0, 1, 2]
    for number in (2, 0, 1):
        board.complete(TaskKind.TRAIN, number)
    assert board.training.current_done
    board.training.advance()
    assert board.training.ends_epoch
    assert board.lease("a", 9, 3) == ()
    board.open()
    assert numbers(board.lease("a", 1, 3)) == [3]
    assert board.training.was_trained(1)
    assert not board.training.was_trained(4)


def test_evaluation_comes_before_training() -> None:
    board = board_of(train_records=4, epochs=2, validation_records=2)
    board.join("a")
    board.lease("a", 4, 0)
    for number in range(4):
        board.complete(TaskKind.TRAIN, number)
    board.training.advance()
    board.begin_evaluation(1)
    tasks = board.lease("a", 3, 1)
    assert [(task.kind, task.micro_batch) for task in tasks] == [(TaskKind.EVALUATE, 0), (TaskKind.EVALUATE, 1)]
    assert board.complete(TaskKind.EVALUATE, 1, 1)[0]
    assert not board.complete(TaskKind.EVALUATE, 1, 1)[0]
    assert board.evaluations.complete is None
    board.complete(TaskKind.EVALUATE, 0, 1)
    assert board.evaluations.complete == 1
    board.end_evaluation(1)
    assert board.lease("a", 3, 1) == ()
    board.open()
    assert numbers(board.lease("a", 3, 1)) == [4, 5, 6]


def test_evaluation_beside_training_comes_after_the_work_of_the_version_and_before_what_is_ahead() -> None:
    board = board_of(train_records=12, validation_records=3)
    board.join("a")
    for number in range(4):
        board.complete(TaskKind.TRAIN, number)
    board.training.advance()
    board.begin_evaluation(1, concurrent=True)
    board.open()
    assert [(task.kind, task.version, task.micro_batch) for task in board.lease("a", 6, 1)] == [
        *((TaskKind.TRAIN, 1, number) for number in range(4, 8)),
        (TaskKind.EVALUATE, 1, 0),
        (TaskKind.TRAIN, 2, 8),
    ]
    for number in range(4, 8):
        board.complete(TaskKind.TRAIN, number)
    board.training.advance()
    board.begin_evaluation(2, concurrent=True)
    board.open()
    tasks = board.lease("a", 9, 2)
    assert [(task.kind, task.version) for task in tasks] == [(TaskKind.TRAIN, 2)] * 3 + [(TaskKind.EVALUATE, 1)]
    assert not board.complete(TaskKind.EVALUATE, 0, 3)[0], "of no evaluation that is on"
    for number in range(3):
        assert board.evaluations.complete is None
        assert board.complete(TaskKind.EVALUATE, number, 1)[0]
    assert board.evaluations.complete == 1
    board.end_evaluation(1)
    assert board.evaluations.versions == (2,)


def test_whoever_has_nothing_to_do_evaluates_whatever_it_has_fetched_ahead() -> None:
    board = board_of(train_records=12, validation_records=8)
    board.join("a")
    board.join("b")
    assert len(board.lease("a", 6, 0)) == 6  # half of each version
    for number in range(4):
        board.complete(TaskKind.TRAIN, number)
    board.training.advance()
    board.begin_evaluation(1, concurrent=True)

    def evaluated(worker: str) -> list[int]:
        return [task.micro_batch for task in board.lease(worker, 0, 1) if task.kind is TaskKind.EVALUATE]

    assert evaluated("a") == [0, 1, 2, 3]  # training is not open: perhaps it waits for this very evaluation
    assert evaluated("a") == []  # it has something to do now
    for number in range(4):
        board.complete(TaskKind.EVALUATE, number, 1, by="a")
    board.open()
    assert evaluated("a") == []  # it can train
    for number in (4, 5):
        board.complete(TaskKind.TRAIN, number, by="a")
    assert numbers(board.lease("b", 0, 1)) == [6]
    assert numbers(board.lease("a", 0, 1)) == [7]
    board.complete(TaskKind.TRAIN, 7, by="a")
    assert evaluated("a") == [4]  # one at a time: the next version may come at any moment
    board.complete(TaskKind.EVALUATE, 4, 1, by="a")
    assert evaluated("a") == [5]


def test_evaluations_that_training_waits_for_come_a_few_at_a_time() -> None:
    board = board_of(train_records=12, validation_records=8)
    board.join("a")
    assert len(board.lease("a", 8, 0)) == 8
    for number in range(4):
        board.complete(TaskKind.TRAIN, number)
    board.training.advance()
    board.begin_evaluation(1)
    assert numbers(board.lease("a", 0, 1)) == [0, 1, 2, 3]
    assert board.lease("a", 0, 1) == ()
    assert numbers(board.lease("a", 2, 1))[:2] == [4, 5]


def test_a_dead_evaluators_tasks_are_given_to_others() -> None:
    board = board_of(validation_records=1)
    board.join("a")
    board.join("b")
    board.begin_evaluation(0, concurrent=True)
    assert any(task.kind is TaskKind.EVALUATE for task in board.lease("a", 9, 0))
    assert not any(task.kind is TaskKind.EVALUATE for task in board.lease("b", 9, 0))
    board.release("a")
    assert any(task.kind is TaskKind.EVALUATE for task in board.lease("b", 9, 0))


def test_nothing_of_the_next_epoch_is_fetched_ahead() -> None:
    """So that nobody computes while hooks run at an epoch's end, and nothing is wasted if they stop the job."""
    board = board_of(train_records=8, epochs=2)
    board.join("a")
    assert {task.version for task in board.lease("a", 99, 0)} == {0, 1}


class Crowd:
    """Workers that compute in order, prefetch, die, stop, lose replies, and come back."""

    def __init__(self, board: TaskBoard, clock: Clock, seed: int) -> None:
        self.board, self.clock, self.random = board, clock, random.Random(seed)
        self.held: dict[str, set[Task]] = {}
        self.stopped: set[str] = set()
        self.born = 0
        self.version = 0
        self.counted: list[tuple[TaskKind, int, int]] = []

    def move(self) -> None:
        self.clock.seconds += self.random.random()
        chance = self.random.random()
        if not self.held or (chance < 0.05 and len(self.held) < 4):
            self.born += 1
            self.held[f"w{self.born}"] = set()
            self.board.join(f"w{self.born}")
            return
        worker = self.random.choice(sorted(self.held))
        if chance < 0.08:
            self.board.release(worker)
            del self.held[worker]
            self.stopped.discard(worker)
        elif chance < 0.12:
            self.stopped ^= {worker}
        elif worker not in self.stopped:
            self.work(worker)

    def work(self, worker: str) -> None:
        tasks = self.held[worker]
        granted = self.board.lease(worker, max(0, 3 - len(tasks)), self.version)
        if self.random.random() > 0.05:  # else the reply is lost
            tasks.update(granted)
        tasks -= {task for task in tasks if task.version < self.version and task.kind is TaskKind.TRAIN}
        ready = sorted(task for task in tasks if task.version <= self.version)
        if ready:
            tasks.discard(ready[0])
            if self.board.complete(ready[0].kind, ready[0].micro_batch, ready[0].version)[0]:
                self.counted.append((ready[0].kind, ready[0].version, ready[0].micro_batch))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from(["sync", "async"]),
    st.integers(1, 5),
    st.integers(1, 15),
    st.integers(0, 4),
    st.integers(0, 3),
)
def test_the_job_always_ends_with_every_micro_batch_counted_once(
    seed: int, mode: str, group: int, records: int, validation: int, beside: int
) -> None:
    job = JobSpec(
        mode=mode, micro_batch_size=1, grads_to_wait=group, epochs=2, train_records=records,
        validation_records=validation,
    )  # fmt: skip
    clock = Clock()
    board = new_board(job, clock)
    crowd = Crowd(board, clock, seed)
    board.open()
    begun = 0
    for _ in range(20_000):
        if board.training.over and not board.evaluations.versions:
            break
        crowd.move()
        if board.training.current_done and board.evaluations.awaited is None:
            board.training.advance()
            crowd.version += 1
            if validation and (board.training.ends_epoch or (beside and crowd.version % beside == 0)):
                begun += 1
                board.begin_evaluation(crowd.version, concurrent=not board.training.ends_epoch)
        if (evaluated := board.evaluations.complete) is not None:
            board.end_evaluation(evaluated)
        if board.evaluations.awaited is None:
            board.open()
    trained = sorted(number for kind, _, number in crowd.counted if kind is TaskKind.TRAIN)
    counted = [entry for entry in crowd.counted if entry[0] is TaskKind.EVALUATE]
    assert trained == list(range(2 * records))
    assert begun >= 2 or not validation
    assert len(counted) == len(set(counted)) == begun * validation
