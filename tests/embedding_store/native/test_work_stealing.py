"""WorkCounter that kernels of several threads take: each once, none lost, and nobody returns while one is under way."""

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
from elastable.embedding_store.native.range_pool import (
    RangePool,
    WorkCounter,
    fail_work,
    join_work,
    leave_work,
    next_pieces,
)
from tests.embedding_store.native.busy_pool import busy_pool

WAIT_S = 60.0


@kernel
def mark(counter: Int64, marks: Int64) -> int:
    """Adds one to each piece's mark; how often pieces were taken."""
    join_work(counter)
    taken = 0
    first, last = next_pieces(counter, len(marks))
    while first < last:
        taken += 1
        for piece in range(first, last):
            marks[piece] += 1
        first, last = next_pieces(counter, len(marks))
    leave_work(counter)
    return taken


@kernel
def fail(counter: Int64) -> None:
    join_work(counter)
    fail_work(counter)
    leave_work(counter)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 7, 1000])
def test_every_piece_is_taken_once(threads: int, count: int) -> None:
    pool = RangePool(threads)
    for _ in range(20):
        counter, marks = WorkCounter(threads), np.zeros(count, np.int64)
        pool.together(lambda counter=counter, marks=marks: mark(counter.state, marks), counter)  # type: ignore[misc]
        np.testing.assert_array_equal(marks, 1)
        assert not counter.failed
    pool.close()


def test_nobody_is_waited_for_who_never_joined() -> None:
    counter, marks = WorkCounter(2), np.zeros(100, np.int64)
    kept = weakref.ref(marks)
    with busy_pool() as pool:
        pool.together(partial(lambda marks: mark(counter.state, marks), marks), counter)
        np.testing.assert_array_equal(marks, 1)
        del marks
        gc.collect()
        assert kept() is None  # though its helper has not come yet


def test_whoever_is_inside_is_waited_for() -> None:
    counter, left = WorkCounter(2), threading.Event()
    join_work(counter.state)

    def leave() -> None:
        time.sleep(0.05)
        left.set()
        leave_work(counter.state)

    thread = threading.Thread(target=leave)
    thread.start()
    counter.wait()
    assert left.is_set()
    thread.join(WAIT_S)


def test_a_thread_that_never_leaves_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastable.embedding_store.native.range_pool._DEADLINE_S", 0.02)
    counter = WorkCounter(2)
    join_work(counter.state)
    with pytest.raises(StoreFailed, match="did not finish its pieces"):
        counter.wait()


def test_what_failed_in_one_is_known_to_all() -> None:
    pool, counter = RangePool(3), WorkCounter(3)
    pool.together(lambda: fail(counter.state), counter)
    assert counter.failed
    pool.close()


def test_an_error_of_the_caller_passes_through_and_one_of_a_helper_is_the_callers_to_make_up() -> None:
    pool, counter, marks = RangePool(2), WorkCounter(2), np.zeros(100, np.int64)
    caller = threading.get_ident()

    def only_the_caller_can() -> None:
        if threading.get_ident() != caller:
            raise MemoryError("in a helper")
        mark(counter.state, marks)

    pool.together(only_the_caller_can, counter)
    np.testing.assert_array_equal(marks, 1)

    def nobody_can() -> None:
        raise MemoryError("everywhere")

    with pytest.raises(MemoryError, match="everywhere"):
        pool.together(nobody_can, WorkCounter(2))
    pool.close()
