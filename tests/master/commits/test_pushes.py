"""What becomes of pushes, in any order of arrival."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastable.embedding_store.errors import BadGradient, BadInput
from elastable.embedding_store.shards import sum_pushes
from elastable.master.api import AsyncPushId, Divisor, DivisorKind, GradientPart, Push, PushOutcome, Slices, SyncPushId
from elastable.master.commits.accumulate import accumulate, row_parts, row_sums
from elastable.master.commits.push_protocol import Sequences
from elastable.master.jobs.job_state import JobState, Work
from elastable.master.master_options import MasterOptions
from elastable.master.tasks.progress import Progress
from tests.master.fakes import job_of

RECORDS = [3, 3, 3, 3, 3, 3, 3, 2]


def pushes_of_version_zero() -> list[Push]:
    random = np.random.default_rng(0)
    return [
        Push(
            SyncPushId(0, number),
            records,
            (random.normal(size=(3, 2)).astype(np.float32),),
            {"t": Slices(random.integers(0, 5, 4), random.normal(size=(4, 2)).astype(np.float32))},
            (random.normal(size=2).astype(np.float32),),
            (random.normal(size=1).astype(np.float32),),
        )
        for number, records in enumerate(RECORDS)
    ]


def bits(pushes: Sequence[Push]) -> list[bytes]:
    """Of the gradient that they come to."""
    made = accumulate(pushes, "mean")
    update = sum_pushes(row_sums(0, pushes, "mean", ()), row_parts(pushes))["t"]
    return [array.tobytes() for array in (*made.dense, update.ids, update.gradients, *made.states, *made.metrics)]


def test_a_push_whose_loss_is_divided_otherwise_is_refused() -> None:
    """Workers that run different models: what they pushed could not be combined."""
    state = JobState(job_of(grads_to_wait=8), MasterOptions(), Progress(), lambda: 0.0)
    state.board.open()
    first, second, *_ = pushes_of_version_zero()
    state.take(replace(first, divisor=Divisor(DivisorKind.NOTHING)), skipped=False)
    other = (GradientPart(Divisor(DivisorKind.AMOUNT, 1.0)),)
    with pytest.raises(BadGradient, match="micro-batch 1 divides its loss by records, amount, and another one of its"):
        state.judge(replace(second, divisor=Divisor(DivisorKind.RECORDS), parts=other))
    assert state.judge(replace(second, divisor=Divisor(DivisorKind.NOTHING))) is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 7), max_size=20), st.permutations(range(8)))
def test_any_order_of_arrival_and_any_duplicates_give_the_same_bits(early: list[int], order: list[int]) -> None:
    state = JobState(job_of(grads_to_wait=8), MasterOptions(), Progress(), lambda: 0.0)
    state.board.open()
    pushes = pushes_of_version_zero()
    expected = bits(pushes)
    seen: set[int] = set()
    for number in [*early, *order]:
        found = state.judge(pushes[number])
        assert (found is None) is (number not in seen)
        if found is None:
            state.take(pushes[number], skipped=False)
        elif isinstance(found, tuple):
            assert found[0] is PushOutcome.DUPLICATE
        seen.add(number)
        assert (state.next_work() is not None) is (len(seen) == 8)
    work = state.next_work() or Work()
    taken = [ticket.push for ticket in work.tickets or () if ticket.push is not None]
    assert bits(taken) == expected
    assert state.committed(work.tickets or (), accumulate(taken, "mean"))
    assert (state.version, state.records, state.epoch) == (1, 23, 1)


@pytest.mark.parametrize("place", ["dense", "slices"])
def test_one_bit_more_in_any_push_shows(place: str) -> None:
    """The comparison above would see a difference."""
    pushes = pushes_of_version_zero()
    expected = bits(pushes)
    values = pushes[3].dense[0] if place == "dense" else pushes[3].slices["t"].values
    values[0, 0] = np.nextafter(values[0, 0] * 2, np.float32(9))
    assert bits(pushes) != expected


def test_a_foreign_push_must_have_records() -> None:
    state = JobState(job_of(mode="async"), MasterOptions(), Progress(), lambda: 0.0)
    state.board.open()
    with pytest.raises(BadInput, match="push of 0 records"):
        state.judge(Push(AsyncPushId("c", 1), 0))


def test_between_epochs_an_async_job_takes_no_push() -> None:
    state = JobState(job_of(mode="async"), MasterOptions(), Progress(), lambda: 0.0)
    found = state.judge(Push(AsyncPushId("c", 1), 3))
    assert isinstance(found, tuple)
    assert found[0] is PushOutcome.STALE


def test_incarnations_are_remembered_up_to_a_bound() -> None:
    sequences = Sequences({"old": 3})
    assert sequences.knows(AsyncPushId("old", 3))
    assert not sequences.knows(AsyncPushId("old", 4))
    assert not sequences.knows(AsyncPushId("new", 1))
    for number in range(65_536):
        sequences.remember(AsyncPushId(f"n{number}", 1))
    assert len(sequences.as_dict()) == 65_536
    assert not sequences.knows(AsyncPushId("old", 3))
