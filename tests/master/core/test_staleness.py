"""Bounded staleness: no push is older than the bound when it is committed, and nobody waits for ever for that."""

import random
from dataclasses import dataclass, field, replace
from functools import partial

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadSpec, FutureVersion
from elastable.embedding_store.shards.server_contract import Slices
from elastable.master.api import AsyncPushId, JobSpec, Push, PushOutcome, PushReply, Task, TaskKind
from elastable.master.commits.accumulate import Accumulated
from elastable.master.commits.committer import Committer
from elastable.master.core.job_state import JobState
from elastable.master.master_options import MasterOptions
from elastable.master.model.dense import DenseState
from elastable.master.tasks.progress import Progress
from tests.master.fakes import Bench, gradient, job_of, small_model
from tests.plugins.seeds import examples


def state_of(bound: int | None, records: int = 12, epochs: int = 1) -> JobState:
    job = JobSpec(mode="async", micro_batch_size=1, train_records=records, epochs=epochs, staleness_bound=bound)
    state = JobState(job, MasterOptions(), Progress(), lambda: 0.0)
    state.board.open()
    return state


@dataclass
class Hand:
    """A worker: what it computes now, and on which version."""

    name: str
    task: Task | None = None
    on: int = 0
    waits: bool = False  # for its push to be committed
    sent: list[Push] = field(default_factory=list)


class Hall:
    """Workers that pull, compute and push in an order that somebody else chooses; a master that commits likewise."""

    def __init__(self, state: JobState, workers: int) -> None:
        self.state = state
        self.hands = [Hand(f"w{number}") for number in range(workers)]
        self.ages: list[int] = []
        self.trained: list[int] = []
        self.refused = 0
        for hand in self.hands:
            state.board.join(hand.name)

    def begin_all(self) -> Task:
        """Everybody computes on the current version; the task of the last one."""
        for hand in self.hands:
            self.begin(hand)
        task = self.hands[-1].task
        assert task is not None
        return task

    def begin(self, hand: Hand) -> None:
        """Takes a task, if there is one, and pulls; a push is waited for."""
        if hand.waits:
            return
        if hand.task is None:
            tasks = self.state.lease(hand.name, 1, ()).tasks
            hand.task = tasks[0] if tasks else None
        hand.on = self.state.version

    def push(self, hand: Hand) -> None:
        """Reports what it has computed; what is refused is free for anyone that very moment."""
        if hand.task is None:
            return
        push = Push(AsyncPushId(hand.name, len(hand.sent) + 1, hand.task.micro_batch), 1, computed_on=hand.on)
        hand.sent.append(push)
        held, hand.task = hand.task, None
        outcome = self.offer(push)
        self.refused += outcome is PushOutcome.STALE
        hand.waits = outcome is PushOutcome.ACCEPTED
        if outcome is PushOutcome.STALE and self.state.board.is_open:
            assert not self.state.board.was_trained(held.micro_batch)
            # Or another one has it, whom a late copy of a push of before that was refused had let have it.
            others = [other.task.micro_batch for other in self.hands if other.task is not None]
            free = self.state.board._is_free(self.state.board._groups[0], held.micro_batch)
            assert free or held.micro_batch in others

    def offer(self, push: Push) -> PushOutcome:
        found = self.state.judge(push)
        if isinstance(found, PushReply):
            return found.outcome
        if found is None:
            self.state.take(push, skipped=False)
            return PushOutcome.ACCEPTED
        return PushOutcome.DUPLICATE

    def commit(self) -> None:
        work = self.state.next_work()
        if work is None or work.tickets is None:
            return
        (ticket,) = work.tickets
        assert isinstance(ticket.id, AsyncPushId)
        assert ticket.push is not None
        assert ticket.push.computed_on is not None
        self.ages.append(self.state.version - ticket.push.computed_on)
        self.trained.append(ticket.id.micro_batch)
        self.state.committed(work.tickets, Accumulated(1))
        self.state.board.open()
        for hand in self.hands:
            hand.waits &= hand.name != ticket.id.incarnation


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 4), st.integers(1, 5), st.integers(1, 12))
def test_the_bound_is_exact_whatever_the_schedule(seed: int, bound: int, workers: int, records: int) -> None:
    hall = Hall(state_of(bound, records, epochs=2), workers)
    chance = random.Random(seed)
    for step in range(40_000):
        if hall.state.board.over:
            break
        hand = chance.choice(hall.hands)
        # Later on it is fair; before, the first workers are as good as stopped, and the master hardly commits.
        odds = (1, 1, 1) if step > 2_000 else (chance.random(), chance.random(), 0.3)
        act = chance.choices((hall.begin, hall.push, None), odds)[0]
        if act is None:
            hall.commit()
        else:
            act(hand)
        if hand.sent and chance.random() < 0.2:
            # A copy of any push of before comes late.
            late = chance.choice(hand.sent)
            version, waiting = hall.state.version, hall.state.progress().done
            if hall.offer(late) is PushOutcome.ACCEPTED:
                pytest.fail(f"{late} counted twice") if late.id.micro_batch in waiting else None
            assert hall.state.version == version
    assert hall.state.board.over, "it never ended"
    assert sorted(hall.trained) == list(range(2 * records))
    assert max(hall.ages) <= bound
    # Every push that counts makes at most one of each other worker's too old: nobody is refused for ever.
    assert hall.refused <= len(hall.trained) * (workers - 1)


def test_a_push_at_the_bound_counts_and_one_beyond_it_does_not() -> None:
    hall = Hall(state_of(1), 3)
    task = hall.begin_all()
    for hand in hall.hands[:2]:
        hall.push(hand)
    # Two are on their way, so it would be committed two versions later, though none has been.
    push = Push(AsyncPushId("w2", 1, task.micro_batch), 1, computed_on=0)
    found = hall.state.judge(push)
    assert isinstance(found, PushReply)
    assert found.outcome is PushOutcome.STALE
    assert "computed on version 0, it would be committed 2 versions later; the bound is 1" in found.reason
    hall.commit()
    hall.commit()
    assert hall.ages == [0, 1]
    assert hall.offer(replace(push, computed_on=1)) is PushOutcome.ACCEPTED


def test_without_a_bound_or_without_its_age_a_push_counts() -> None:
    for bound, computed_on in ((None, 0), (0, None)):
        hall = Hall(state_of(bound), 3)
        task = hall.begin_all()
        for hand in hall.hands[:2]:
            hall.push(hand)
            hall.commit()
            hall.begin(hand)
        push = Push(AsyncPushId("w2", 1, task.micro_batch), 1, computed_on=computed_on)
        assert hall.state.version >= 1
        assert hall.offer(push) is PushOutcome.ACCEPTED


def test_what_was_computed_on_a_version_that_is_not_there_is_refused() -> None:
    """By a worker of a master that died: the one in its place is at an earlier version."""
    with pytest.raises(FutureVersion, match="computed on version 3, which is not there; the current is 0"):
        state_of(None).judge(Push(AsyncPushId("w", 1, 0), 1, computed_on=3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "sync", "staleness_bound": 3}, "staleness_bound is for mode async"),
        ({"mode": "sync", "staleness_modulation": "inverse"}, "staleness_modulation is for mode async"),
        ({"steps_per_epoch": 2}, "steps_per_epoch is for mode sync"),
        ({"staleness_bound": -1}, "must not be negative, got -1"),
        ({"staleness_bound": 2**63}, "must lie within -9223372036854775808 and 9223372036854775807"),
        ({"seed": -(2**63) - 1}, "job seed must lie within"),
        ({"intra_op_threads": 2**31}, "job intra_op_threads must lie within -2147483648 and 2147483647"),
        ({"staleness_modulation": "half"}, "staleness_modulation 'half': use none or inverse"),
    ],
)
def test_jobs_that_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(BadSpec, match=message):
        JobSpec(**{"mode": "async", **changes})  # type: ignore[arg-type]


OPTIMIZERS = {
    "adamw": lambda rate: keras.optimizers.AdamW(rate, weight_decay=0.1),
    "schedule": lambda rate: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(rate, 1, 0.5)),
}


def _model(optimizer: str, rate: float) -> keras.Model:
    return small_model(OPTIMIZERS[optimizer](rate))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_modulation_is_a_smaller_learning_rate_for_dense_variables_and_rows_alike(optimizer: str) -> None:
    """A push three versions behind, at rate 0.2, does what a fresh one does at 0.05."""
    results = []
    for rate, behind, modulation in ((0.2, 3, "inverse"), (0.05, 0, "inverse"), (0.2, 3, "none"), (0.2, 0, "none")):
        bench = Bench(job_of(mode="async", staleness_modulation=modulation), make=partial(_model, optimizer, rate))
        committer = Committer(bench.store, bench.dense, bench.job, 1.0)
        snapshot = bench.dense.snapshot(0)
        task = Task(0, TaskKind.TRAIN, 0, 0, 0, 3)
        push = gradient(bench.job, task, snapshot, bench.store, AsyncPushId("w", 1, 0))
        # Both at the same step of the schedule: what differs is only what the push says of its age.
        committer.commit(1, [replace(push, computed_on=-behind)], lambda made: Progress(1))
        results.append(bench.everything())
    modulated, fresh, whole, plain = results
    count = len(bench.dense.variables) + len(bench.dense.states)
    for one, other in zip(modulated[:count] + modulated[-3:], fresh[:count] + fresh[-3:], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8)
    for one, other in zip(whole, plain, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.allclose(modulated[-2], plain[-2], rtol=1e-3)
    assert not all(np.allclose(one, other, rtol=1e-3) for one, other in zip(modulated[:2], plain[:2], strict=True))


def test_after_a_late_push_the_rate_is_what_it_was() -> None:
    store, model = MemoryStore(), small_model(keras.optimizers.SGD(0.5))
    store.create_table(TableSpec("t", 2, optimizer=OptimizerSpec.of("sgd", learning_rate=9.0)))
    dense = DenseState(model)
    committer = Committer(store, dense, job_of(mode="async", staleness_modulation="inverse"), 1.0)
    steps: list[list[float]] = []

    def standing(made: Accumulated) -> Progress:
        return Progress(len(steps) + 1)

    for version, behind in ((1, 0), (2, 1), (3, 0)):
        before = [*dense.snapshot(0).variables, store.lookup({"t": np.array([1])})["t"]]
        now, rows = dense.snapshot(0), {"t": Slices(np.array([1]), np.ones((1, 2), np.float32))}
        ones = tuple(np.ones_like(value) for value in now.variables)
        push = Push(AsyncPushId("w", version, -1), 1, ones, rows, now.states, computed_on=version - 1 - behind)
        committer.commit(version, [push], standing)
        after = [*dense.snapshot(0).variables, store.lookup({"t": np.array([1])})["t"]]
        steps.append([float((one - other).max()) for one, other in zip(before, after, strict=True)])
    np.testing.assert_allclose(steps, np.outer([0.5, 0.25, 0.5], np.ones(len(steps[0]))), rtol=1e-5)
    assert dense.steps()[0].rate == 0.5
