"""What workers say that they hold, and backups: nothing waits for a lease to end, and nothing counts twice."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastable.embedding_store.errors import NotJoined
from elastable.master.api import JobSpec, Task, TaskKind
from elastable.master.tasks.schedule import Schedule
from elastable.master.tasks.task_board import TaskBoard
from tests.master.tasks.test_task_board import Clock, new_board, numbers


def board_of(
    clock: Clock | None = None,
    backup_after: float | None = None,
    position: int = 0,
    done: tuple[int, ...] = (),
    **job: object,
) -> TaskBoard:
    spec = JobSpec(**{"micro_batch_size": 1, "grads_to_wait": 4, "train_records": 12, **job})  # type: ignore[arg-type]
    board = new_board(spec, clock or Clock(), backup_after, position, done)
    board.open()
    return board


def test_what_a_lost_answer_gave_comes_again() -> None:
    board = board_of()
    board.join("a")
    lost = board.lease("a", 6, 0)
    found = board.reconcile("a", (), 0)
    assert (found.tasks, found.revoked) == (lost, ())
    assert board.reconcile("a", lost[:2], 0).tasks == lost[2:]
    board.complete(TaskKind.TRAIN, 3)
    assert board.reconcile("a", lost[:2], 0).tasks == tuple(task for task in lost[2:] if task.micro_batch != 3)


def test_evaluation_tasks_come_again_too() -> None:
    board = board_of(validation_records=3)
    board.join("a")
    board.begin_evaluation(0, concurrent=True)
    lost = [task for task in board.lease("a", 9, 0) if task.kind is TaskKind.EVALUATE]
    again = board.reconcile("a", (), 0).tasks
    assert len(lost) == 1
    assert [task for task in again if task.kind is TaskKind.EVALUATE] == lost
    board.end_evaluation(0)
    assert board.reconcile("a", lost, 0).revoked == tuple(lost)


def test_what_is_anothers_or_done_or_of_no_version_in_work_is_to_be_dropped() -> None:
    clock = Clock()
    board = board_of(clock)
    board.join("a")
    board.join("b")
    ours = board.lease("a", 3, 0)
    assert numbers(ours) == [0, 1, 4]
    theirs = board.lease("b", 3, 0)
    board.complete(TaskKind.TRAIN, 0)
    ahead = [Schedule(JobSpec(micro_batch_size=1, grads_to_wait=4, train_records=99)).task(9, 36)]
    found = board.reconcile("a", [*ours, theirs[0], *ahead], 0)
    assert found.tasks == ()
    assert found.revoked == (ours[0], theirs[0], *ahead)
    # A worker that is stopped for longer than its lease finds that it was done elsewhere, or is being done.
    clock.seconds += 11
    assert numbers(board.lease("b", 1, 0)) == [1]
    assert board.reconcile("a", ours[1:], 0).revoked == ours[1:2]
    # What nobody has taken it may go on with, but no longer than until somebody asks for it.
    clock.seconds += 11
    assert board.reconcile("a", ours[2:], 0).revoked == ()


def test_a_worker_that_says_that_it_holds_a_task_does_not_hold_it_for_longer() -> None:
    """Its feed asks on while its computation hangs."""
    clock = Clock()
    board = board_of(clock, train_records=1)
    board.join("hangs")
    board.join("b")
    held = board.lease("hangs", 1, 0)
    for _ in range(12):
        clock.seconds += 1
        assert board.reconcile("hangs", held, 0).revoked == ()
    assert board.lease("b", 1, 0) == held


def test_a_worker_takes_what_it_holds_to_a_master_that_was_started_again() -> None:
    before = board_of(grads_to_wait=2, train_records=20)
    before.join("a")
    held = before.lease("a", 8, 0)
    now = board_of(grads_to_wait=2, train_records=20)
    now.join("a")
    now.join("b")
    assert now.reconcile("a", held[2:], 0).revoked == ()
    assert numbers(now.lease("b", 8, 0)) == [0]
    assert numbers(now.lease("a", 8, 0)) == [1]
    # One that stands further on has no use for it.
    later = board_of(grads_to_wait=2, train_records=20, position=2)
    later.join("a")
    assert later.reconcile("a", held, 2).revoked == tuple(task for task in held if task.version < 2)


def test_async_tasks_that_a_checkpoint_holds_are_dropped() -> None:
    before = board_of(mode="async", train_records=6)
    before.join("a")
    held = before.lease("a", 4, 0)
    board = board_of(mode="async", train_records=6, done=(0, 2))
    board.join("a")
    assert numbers(board.reconcile("a", held, 2).revoked) == [0, 2]


def test_nothing_is_taken_over_between_epochs() -> None:
    board = board_of(mode="async", train_records=2, epochs=2, validation_records=1)
    board.join("a")
    for number in numbers(board.lease("a", 4, 0)):
        board.complete(TaskKind.TRAIN, number)
    board.training.advance()
    board.begin_evaluation(2)
    early = Schedule(JobSpec(mode="async", micro_batch_size=1, train_records=2, epochs=2)).task(2, 2)
    assert board.reconcile("a", [early], 2).revoked == (early,)
    board.end_evaluation(2)
    board.open()
    assert board.reconcile("a", [early], 2).revoked == ()


def test_a_worker_must_join_to_say_anything() -> None:
    with pytest.raises(NotJoined, match="'a' has not joined"):
        board_of().reconcile("a", (), 0)


def test_a_micro_batch_that_is_given_back_is_free_at_once() -> None:
    board = board_of(mode="async", train_records=2)
    board.join("a")
    board.join("b")
    board.lease("a", 1, 0)
    board.lease("b", 1, 0)
    board.give_back(0, "b")  # which does not have it
    assert board.lease("b", 1, 0) == ()
    board.complete(TaskKind.TRAIN, 1)
    assert board.lease("b", 1, 0) == ()
    board.give_back(0, "a")
    assert numbers(board.lease("b", 1, 0)) == [0]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_idle_worker_backs_a_slow_one_up(mode: str) -> None:
    clock = Clock()
    board = board_of(clock, backup_after=3.0, mode=mode, grads_to_wait=2, train_records=2)
    board.join("slow")
    board.join("idle")
    assert numbers(board.lease("slow", 1, 0)) == [0]
    assert numbers(board.lease("idle", 1, 0)) == [1]
    clock.seconds += 4
    assert board.lease("idle", 1, 0) == (), "it has work of its own"
    board.complete(TaskKind.TRAIN, 1, by="idle")
    assert numbers(board.lease("idle", 0, 0)) == [0]
    assert board.lease("idle", 1, 0) == (), "once is enough"
    # Whoever is first counts, and it is known who.
    assert board.complete(TaskKind.TRAIN, 0, by="slow") == (True, "slow")
    assert board.complete(TaskKind.TRAIN, 0, by="idle") == (False, None)
    assert board.training.current_done


def test_no_backup_before_its_time_nor_for_a_worker_that_makes_progress() -> None:
    clock = Clock()
    board = board_of(clock, backup_after=3.0, train_records=4)
    board.join("a")
    held = numbers(board.lease("a", 4, 0))
    board.join("idle")
    clock.seconds += 2
    assert board.lease("idle", 1, 0) == ()
    board.complete(TaskKind.TRAIN, held[0], by="a")
    clock.seconds += 2
    assert board.lease("idle", 1, 0) == (), "its holder finished another one two seconds ago"
    clock.seconds += 2
    assert numbers(board.lease("idle", 1, 0)) == [held[1]]
    # A third worker takes another one that is waiting, rather than the same.
    board.join("third")
    assert numbers(board.lease("third", 1, 0)) == [held[2]]


def test_without_the_option_there_are_no_backups() -> None:
    clock = Clock()
    board = board_of(clock, train_records=1)
    board.join("slow")
    board.lease("slow", 1, 0)
    board.join("idle")
    clock.seconds += 9.9
    assert board.lease("idle", 1, 0) == ()


def test_an_evaluation_that_training_waits_for_is_backed_up() -> None:
    clock = Clock()
    board = board_of(clock, backup_after=3.0, train_records=1, validation_records=1)
    board.join("slow")
    board.lease("slow", 1, 0)
    board.complete(TaskKind.TRAIN, 0)
    board.training.advance()
    board.begin_evaluation(1)
    assert [task.kind for task in board.lease("slow", 1, 1)] == [TaskKind.EVALUATE]
    board.join("idle")
    clock.seconds += 4
    assert [task.kind for task in board.lease("idle", 1, 1)] == [TaskKind.EVALUATE]


class Tellers:
    """Workers that say what they hold; their answers get lost, and they come, go, hang and are backed up."""

    def __init__(self, board: TaskBoard, random: random.Random) -> None:
        self.board, self.random, self.version = board, random, 0
        self.held: dict[str, set[Task]] = {}
        self.counted: list[int] = []
        self.born = 0

    def join(self) -> None:
        self.born += 1
        self.held[f"w{self.born}"] = set()
        self.board.join(f"w{self.born}")

    def move(self, faults: bool) -> None:
        chance = self.random.random() if faults else 1.0
        if not self.held or (chance < 0.05 and len(self.held) < 4):
            self.join()
        worker = self.random.choice(sorted(self.held))
        if chance < 0.08:
            self.board.release(worker)
            del self.held[worker]
            return
        tasks = self.held[worker]
        want = max(0, 3 - len(tasks))
        found = self.board.reconcile(worker, tasks, self.version)
        granted = (*found.tasks, *self.board.lease(worker, want - len(found.tasks), self.version))
        if chance < 0.4:
            return  # the answer is lost
        tasks -= set(found.revoked)
        tasks.update(granted)
        ready = sorted(task for task in tasks if task.version <= self.version)
        if ready and chance > 0.6:
            tasks.discard(ready[0])
            if self.board.complete(ready[0].kind, ready[0].micro_batch, by=worker)[0]:
                self.counted.append(ready[0].micro_batch)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["sync", "async"]), st.integers(1, 5), st.integers(1, 15), st.booleans())
def test_with_a_clock_that_stands_still_every_micro_batch_is_counted_once(
    seed: int, mode: str, group: int, records: int, restart: bool
) -> None:
    """Answers are lost all the time, and no lease ever ends: what is lost comes again when its worker asks."""
    job = JobSpec(mode=mode, micro_batch_size=1, grads_to_wait=group, epochs=2, train_records=records)
    schedule, chance = Schedule(job), random.Random(seed)
    crowd = Tellers(new_board(job, Clock()), chance)
    crowd.board.open()
    for step in range(20_000):
        if crowd.board.training.over:
            break
        crowd.move(faults=step < 2_000)
        if restart and step == 40:
            # Another master takes over at the version that stands; its workers join it with all that they hold.
            crowd.board = new_board(
                job, Clock(), position=crowd.board.training.position, done=crowd.board.training.done()
            )
            if mode == "sync":
                now = schedule.micro_batches(crowd.version) if crowd.version < schedule.versions_total else range(0)
                crowd.counted = [number for number in crowd.counted if number not in now]
                crowd.board = new_board(job, Clock(), position=crowd.board.training.position)
            for worker in crowd.held:
                crowd.board.join(worker)
            crowd.board.open()
        while crowd.board.training.current_done:
            crowd.board.training.advance()
            crowd.version += 1
            crowd.board.open()
    assert sorted(crowd.counted) == list(range(2 * records))
