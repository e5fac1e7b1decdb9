"""Leases and backups: whatever workers do and say, every micro-batch is done once and the job ends."""

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastable.embedding_store.errors import NotJoined
from elastable.master.api import JobSpec, Lease, Task, TaskKind, Waiting
from elastable.master.commits.push_protocol import AsyncPushes, SyncPushes
from elastable.master.master_options import MasterOptions
from elastable.master.tasks.progress import Progress
from elastable.master.tasks.schedule import Schedule
from elastable.master.tasks.stream_schedule import StreamSchedule
from elastable.master.tasks.task_board import TaskBoard
from tests.untyped import Keywords


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def board_of(
    clock: Clock | None = None,
    backup_after: float | None = None,
    position: int = 0,
    done: tuple[int, ...] = (),
    workers: str = "",
    **job: object,
) -> TaskBoard:
    """An open board, which these workers have joined, of a job that begins, or goes on with its group `position`."""
    spec = JobSpec(**{"micro_batch_size": 1, "grads_to_wait": 4, "train_records": 12, **job})  # type: ignore[arg-type]
    options = MasterOptions(lease_seconds=10.0, backup_after_s=backup_after)
    protocol = SyncPushes if spec.mode == "sync" else AsyncPushes
    start = Progress(version=position, epoch=position, done=done)
    board = protocol(Schedule(spec), options, start, clock or Clock()).board
    board.open()
    for worker in workers.split():
        board.join(worker)
    return board


def numbers(tasks: tuple[Task, ...]) -> list[int]:
    return [task.micro_batch for task in tasks]


def train(board: TaskBoard, micro_batches: Iterable[int]) -> None:
    """Completes the current group, which these are what is left of."""
    for number in micro_batches:
        board.complete(TaskKind.TRAIN, number)
    assert board.current_done
    board.advance()


def test_the_first_to_ask_does_not_get_everything() -> None:
    board = board_of(workers="a b")
    assert numbers(board.lease("a", 4, 0)) == [0, 1, 4, 5]
    assert numbers(board.lease("a", 4, 0)) == [8, 9]
    assert numbers(board.lease("b", 3, 0)) == [2, 3, 6]


def test_look_ahead_is_bounded() -> None:
    board = board_of(train_records=100, workers="a")
    tasks = board.lease("a", 100, 0)
    assert {task.version for task in tasks} == {0, 1, 2, 3}
    assert len(tasks) == 16


def test_a_reissued_task_does_not_wait_behind_fetched_ones() -> None:
    board = board_of(workers="a b")
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
    board = board_of(clock, train_records=4, workers="stopped b")
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
    assert board.current_done


def test_leases_of_fetched_tasks_do_not_run_before_their_version_is_open() -> None:
    clock = Clock()
    board = board_of(clock, grads_to_wait=2, train_records=4, workers="a b")
    board.lease("a", 9, 0)
    clock.seconds += 100
    board.complete(TaskKind.TRAIN, 0)
    board.lease("b", 9, 0)
    train(board, [1])
    board.open()
    clock.seconds += 5
    assert board.lease("b", 9, 1) == ()
    clock.seconds += 6
    assert numbers(board.lease("b", 9, 1)) == [2]


def test_a_worker_must_join() -> None:
    with pytest.raises(NotJoined, match="'a' has not joined"):
        board_of().lease("a", 1, 0)
    with pytest.raises(NotJoined, match="'a' has not joined"):
        board_of().reconcile("a", (), 0)


def test_async_tasks_come_in_order_and_stop_at_the_epochs_end() -> None:
    board = board_of(mode="async", train_records=3, epochs=2, workers="a")
    assert numbers(board.lease("a", 9, 0)) == [0, 1, 2]
    train(board, (2, 0, 1))
    assert board.ends_epoch
    assert board.lease("a", 9, 3) == ()
    board.open()
    assert numbers(board.lease("a", 1, 3)) == [3]
    assert board.was_trained(1)
    assert not board.was_trained(4)


def test_evaluation_comes_before_training() -> None:
    board = board_of(train_records=4, epochs=2, validation_records=2, workers="a")
    board.lease("a", 4, 0)
    train(board, range(4))
    board.begin_evaluation(1)
    tasks = board.lease("a", 3, 1)
    assert [(task.kind, task.micro_batch) for task in tasks] == [(TaskKind.EVALUATE, 0), (TaskKind.EVALUATE, 1)]
    assert board.complete(TaskKind.EVALUATE, 1, 1)[0]
    assert not board.complete(TaskKind.EVALUATE, 1, 1)[0]
    assert board.evaluated is None
    board.complete(TaskKind.EVALUATE, 0, 1)
    assert board.evaluated == 1
    board.end_evaluation(1)
    assert board.lease("a", 3, 1) == ()
    board.open()
    assert numbers(board.lease("a", 3, 1)) == [4, 5, 6]


def test_evaluation_beside_training_comes_after_the_work_of_the_version_and_before_what_is_ahead() -> None:
    board = board_of(train_records=12, validation_records=3, workers="a")
    train(board, range(4))
    board.begin_evaluation(1, concurrent=True)
    board.open()
    assert [(task.kind, task.version, task.micro_batch) for task in board.lease("a", 6, 1)] == [
        *((TaskKind.TRAIN, 1, number) for number in range(4, 8)),
        (TaskKind.EVALUATE, 1, 0),
        (TaskKind.TRAIN, 2, 8),
    ]
    train(board, range(4, 8))
    board.begin_evaluation(2, concurrent=True)
    board.open()
    tasks = board.lease("a", 9, 2)
    assert [(task.kind, task.version) for task in tasks] == [(TaskKind.TRAIN, 2)] * 3 + [(TaskKind.EVALUATE, 1)]
    assert not board.complete(TaskKind.EVALUATE, 0, 3)[0], "of no evaluation that is on"
    for number in range(3):
        assert board.evaluated is None
        assert board.complete(TaskKind.EVALUATE, number, 1)[0]
    assert board.evaluated == 1
    board.end_evaluation(1)
    assert list(board.evaluations) == [2]


def test_whoever_has_nothing_to_do_evaluates_whatever_it_has_fetched_ahead() -> None:
    board = board_of(train_records=12, validation_records=8, workers="a b")
    assert len(board.lease("a", 6, 0)) == 6  # half of each version
    train(board, range(4))
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
    board = board_of(train_records=12, validation_records=8, workers="a")
    assert len(board.lease("a", 8, 0)) == 8
    train(board, range(4))
    board.begin_evaluation(1)
    assert numbers(board.lease("a", 0, 1)) == [0, 1, 2, 3]
    assert board.lease("a", 0, 1) == ()
    assert numbers(board.lease("a", 2, 1))[:2] == [4, 5]


def test_nothing_of_the_next_epoch_is_fetched_ahead() -> None:
    """So that nobody computes while hooks run at an epoch's end, and nothing is wasted if they stop the job."""
    board = board_of(train_records=8, epochs=2, workers="a")
    assert {task.version for task in board.lease("a", 99, 0)} == {0, 1}


class Crowd:
    """Workers that compute in order, prefetch, die, stop, lose answers, and come back.

    Where the clock stands still they say what they hold, and so get again what a lost answer gave them.
    """

    def __init__(self, board: TaskBoard, chance: random.Random, clock: Clock | None) -> None:
        self.board, self.random, self.clock = board, chance, clock
        self.held: dict[str, set[Task]] = {}
        self.stopped: set[str] = set()
        self.born = 0
        self.version = 0
        self.counted: list[tuple[TaskKind, int, int]] = []

    def move(self, faults: bool = True) -> None:
        if self.clock is not None:
            self.clock.seconds += self.random.random()
        chance = self.random.random() if faults else 1.0
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
        elif chance < 0.12 and self.clock is not None:
            self.stopped ^= {worker}
        elif worker not in self.stopped:
            self.work(worker, faults)

    def work(self, worker: str, faults: bool) -> None:
        tasks, found = self.held[worker], Lease()
        if self.clock is None:
            found = self.board.reconcile(worker, tasks, self.version)
        want = max(0, 3 - len(tasks)) - len(found.tasks)
        granted = (*found.tasks, *self.board.lease(worker, want, self.version))
        lost = faults and self.random.random() < (0.4 if self.clock is None else 0.05)
        if not lost:
            tasks -= set(found.revoked)
            tasks.update(granted)
        tasks -= {task for task in tasks if task.version < self.version and task.kind is TaskKind.TRAIN}
        ready = sorted(task for task in tasks if task.version <= self.version)
        if ready and not (lost and self.clock is None):
            tasks.discard(ready[0])
            if self.board.complete(ready[0].kind, ready[0].micro_batch, ready[0].version, by=worker)[0]:
                self.counted.append((ready[0].kind, ready[0].version, ready[0].micro_batch))

    def trained(self) -> list[int]:
        return sorted(number for kind, _, number in self.counted if kind is TaskKind.TRAIN)


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
    clock = Clock()
    sizes: Keywords = {"grads_to_wait": group, "train_records": records, "validation_records": validation}
    board = board_of(clock, mode=mode, epochs=2, **sizes)
    crowd, begun = Crowd(board, random.Random(seed), clock), 0
    for _ in range(20_000):
        if board.over and not board.evaluations:
            break
        crowd.move()
        if board.current_done and board.awaited is None:
            board.advance()
            crowd.version += 1
            if validation and (board.ends_epoch or (beside and crowd.version % beside == 0)):
                begun += 1
                board.begin_evaluation(crowd.version, concurrent=not board.ends_epoch)
        if (evaluated := board.evaluated) is not None:
            board.end_evaluation(evaluated)
        if board.awaited is None:
            board.open()
    counted = [entry for entry in crowd.counted if entry[0] is TaskKind.EVALUATE]
    assert crowd.trained() == list(range(2 * records))
    assert begun >= 2 or not validation
    assert len(counted) == len(set(counted)) == begun * validation


def test_what_a_lost_answer_gave_comes_again() -> None:
    board = board_of(workers="a")
    lost = board.lease("a", 6, 0)
    found = board.reconcile("a", (), 0)
    assert (found.tasks, found.revoked) == (lost, ())
    assert board.reconcile("a", lost[:2], 0).tasks == lost[2:]
    board.complete(TaskKind.TRAIN, 3)
    assert board.reconcile("a", lost[:2], 0).tasks == tuple(task for task in lost[2:] if task.micro_batch != 3)


def test_what_a_worker_holds_of_a_later_version_of_a_stream_is_its_own_again() -> None:
    """Where its session is new, as after the master was: what it held may have been cut in another way."""
    job = JobSpec(micro_batch_size=1, grads_to_wait=2, train_records=8, stream=True, epochs=0)
    schedule = StreamSchedule(job)
    assert schedule.plan({"only": Waiting("0", [str(number) for number in range(1, 6)], False)}, 0.0, 0.0)
    assert [len(schedule.micro_batches(version)) for version in range(3)] == [2, 2, 1]
    board = SyncPushes(schedule, MasterOptions(), Progress(), Clock()).board
    board.open()
    board.join("a")
    held = board.lease("a", 9, 0)
    assert numbers(held) == [0, 1, 2, 3, 4]
    board.release("a")
    board.join("a")
    assert board.reconcile("a", held, 0) == Lease((), revoked=())
    assert board.reconcile("a", held[:1], 0).tasks == held[1:]


def test_evaluation_tasks_come_again_too() -> None:
    board = board_of(validation_records=3, workers="a")
    board.begin_evaluation(0, concurrent=True)
    lost = [task for task in board.lease("a", 9, 0) if task.kind is TaskKind.EVALUATE]
    again = board.reconcile("a", (), 0).tasks
    assert len(lost) == 1
    assert [task for task in again if task.kind is TaskKind.EVALUATE] == lost
    board.end_evaluation(0)
    assert board.reconcile("a", lost, 0).revoked == tuple(lost)


def test_what_is_anothers_or_done_or_of_no_version_in_work_is_to_be_dropped() -> None:
    clock = Clock()
    board = board_of(clock, workers="a b")
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
    board = board_of(clock, train_records=1, workers="hangs b")
    held = board.lease("hangs", 1, 0)
    for _ in range(12):
        clock.seconds += 1
        assert board.reconcile("hangs", held, 0).revoked == ()
    assert board.lease("b", 1, 0) == held


def test_a_worker_takes_what_it_holds_to_a_master_that_was_started_again() -> None:
    before = board_of(grads_to_wait=2, train_records=20, workers="a")
    held = before.lease("a", 8, 0)
    now = board_of(grads_to_wait=2, train_records=20, workers="a b")
    assert now.reconcile("a", held[2:], 0).revoked == ()
    assert numbers(now.lease("b", 8, 0)) == [0]
    assert numbers(now.lease("a", 8, 0)) == [1]
    # One that is further on has no use for it.
    later = board_of(grads_to_wait=2, train_records=20, position=2, workers="a")
    assert later.reconcile("a", held, 2).revoked == tuple(task for task in held if task.version < 2)


def test_async_tasks_that_a_checkpoint_holds_are_dropped() -> None:
    before = board_of(mode="async", train_records=6, workers="a")
    held = before.lease("a", 4, 0)
    board = board_of(mode="async", train_records=6, done=(0, 2), workers="a")
    assert numbers(board.reconcile("a", held, 2).revoked) == [0, 2]


def test_nothing_is_taken_over_between_epochs() -> None:
    board = board_of(mode="async", train_records=2, epochs=2, validation_records=1, workers="a")
    train(board, numbers(board.lease("a", 4, 0)))
    board.begin_evaluation(2)
    early = Schedule(JobSpec(mode="async", micro_batch_size=1, train_records=2, epochs=2)).task(2, 2)
    assert board.reconcile("a", [early], 2).revoked == (early,)
    board.end_evaluation(2)
    board.open()
    assert board.reconcile("a", [early], 2).revoked == ()


def test_a_micro_batch_that_is_given_back_is_free_at_once() -> None:
    board = board_of(mode="async", train_records=2, workers="a b")
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
    board = board_of(clock, backup_after=3.0, mode=mode, grads_to_wait=2, train_records=2, workers="slow idle")
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
    assert board.current_done


def test_no_backup_without_the_option_before_its_time_nor_for_a_worker_that_makes_progress() -> None:
    clock = Clock()
    without = board_of(clock, train_records=1, workers="slow idle")
    without.lease("slow", 1, 0)
    clock.seconds += 9.9
    assert without.lease("idle", 1, 0) == ()
    board = board_of(clock, backup_after=3.0, train_records=4, workers="a")
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


def test_an_evaluation_that_training_waits_for_is_backed_up() -> None:
    clock = Clock()
    board = board_of(clock, backup_after=3.0, train_records=1, validation_records=1, workers="slow")
    board.lease("slow", 1, 0)
    train(board, [0])
    board.begin_evaluation(1)
    assert [task.kind for task in board.lease("slow", 1, 1)] == [TaskKind.EVALUATE]
    board.join("idle")
    clock.seconds += 4
    assert [task.kind for task in board.lease("idle", 1, 1)] == [TaskKind.EVALUATE]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["sync", "async"]), st.integers(1, 5), st.integers(1, 15), st.booleans())
def test_micro_batches_count_once_without_time(seed: int, mode: str, group: int, records: int, restart: bool) -> None:
    """Answers are lost all the time, and no lease ever ends: what is lost comes again when its worker asks."""
    job: Keywords = {"mode": mode, "grads_to_wait": group, "epochs": 2, "train_records": records}
    schedule = Schedule(JobSpec(micro_batch_size=1, **job))
    crowd = Crowd(board_of(**job), random.Random(seed), None)
    for step in range(20_000):
        if crowd.board.over:
            break
        crowd.move(faults=step < 2_000)
        if restart and step == 40:
            # Another master takes over at the current version; its workers join it with all that they hold.
            done = crowd.board.done() if mode == "async" else ()
            crowd.board = board_of(position=crowd.board.position, done=done, workers=" ".join(crowd.held), **job)
            if mode == "sync":
                now = schedule.micro_batches(crowd.version) if crowd.version < schedule.versions_total else range(0)
                crowd.counted = [entry for entry in crowd.counted if entry[2] not in now]
        while crowd.board.current_done:
            crowd.board.advance()
            crowd.version += 1
            crowd.board.open()
    assert crowd.trained() == list(range(2 * records))
