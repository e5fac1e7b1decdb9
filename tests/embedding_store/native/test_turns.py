"""Turns that kernels of several threads take: each once, none lost, and nobody returns while one is under way."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from functools import partial

import numpy as np
import pytest

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.range_pool import RangePool
from elastable.embedding_store.native.turns import Turns, fail_turns, join_turns, leave_turns, next_turns
from tests.embedding_store.native.busy_pool import busy_pool

WAIT_S = 30.0


@kernel
def mark(turns: Int64, marks: Int64) -> int:
    """Adds one to each turn's mark; how often turns were taken."""
    join_turns(turns)
    taken = 0
    first, last = next_turns(turns, len(marks))
    while first < last:
        taken += 1
        for turn in range(first, last):
            marks[turn] += 1
        first, last = next_turns(turns, len(marks))
    leave_turns(turns)
    return taken


@kernel
def fail(turns: Int64) -> None:
    join_turns(turns)
    fail_turns(turns)
    leave_turns(turns)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 7, 1000])
def test_every_turn_is_taken_once(threads: int, count: int) -> None:
    pool = RangePool(threads)
    for _ in range(20):
        turns, marks = Turns(threads), np.zeros(count, np.int64)
        pool.together(lambda turns=turns, marks=marks: mark(turns.state, marks), turns)  # type: ignore[misc]
        np.testing.assert_array_equal(marks, 1)
        assert not turns.failed
    pool.close()


def test_fewer_are_taken_at_a_time_the_fewer_are_left() -> None:
    assert mark(Turns(1).state, np.zeros(1024, np.int64)) < 24


def test_nobody_is_waited_for_who_never_joined() -> None:
    turns, marks = Turns(2), np.zeros(100, np.int64)
    kept = weakref.ref(marks)
    with busy_pool() as pool:
        pool.together(partial(lambda marks: mark(turns.state, marks), marks), turns)
        np.testing.assert_array_equal(marks, 1)
        del marks
        gc.collect()
        assert kept() is None  # though its helper has not come yet


def test_whoever_is_inside_is_waited_for() -> None:
    turns, left = Turns(2), threading.Event()
    join_turns(turns.state)

    def leave() -> None:
        time.sleep(0.05)
        left.set()
        leave_turns(turns.state)

    thread = threading.Thread(target=leave)
    thread.start()
    turns.wait()
    assert left.is_set()
    thread.join(WAIT_S)


def test_a_thread_that_never_leaves_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastable.embedding_store.native.turns._DEADLINE_S", 0.02)
    turns = Turns(2)
    join_turns(turns.state)
    with pytest.raises(StoreFailed, match="did not end its turn"):
        turns.wait()


def test_what_failed_in_one_is_known_to_all() -> None:
    pool, turns = RangePool(3), Turns(3)
    pool.together(lambda: fail(turns.state), turns)
    assert turns.failed
    pool.close()


def test_an_error_of_the_caller_passes_through_and_one_of_a_helper_is_the_callers_to_make_up() -> None:
    pool, turns, marks = RangePool(2), Turns(2), np.zeros(100, np.int64)
    caller = threading.get_ident()

    def only_the_caller_can() -> None:
        if threading.get_ident() != caller:
            raise MemoryError("in a helper")
        mark(turns.state, marks)

    pool.together(only_the_caller_can, turns)
    np.testing.assert_array_equal(marks, 1)

    def nobody_can() -> None:
        raise MemoryError("everywhere")

    with pytest.raises(MemoryError, match="everywhere"):
        pool.together(nobody_can, Turns(2))
    pool.close()
