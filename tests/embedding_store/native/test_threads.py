"""The pool of threads over ranges, and the readers-writer lock."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import DeadlineExceeded, StoreFailed
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.range_pool import (
    SERIAL,
    RangePool,
    WorkCounter,
    fail_work,
    join_work,
    leave_work,
    next_pieces,
)
from elastable.embedding_store.support.readers_writer_lock import ReadersWriterLock
from tests.threads import on_threads

WAIT_S = 60.0


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("count", "size"), [(0, 1), (1, 1), (7, 1), (7, 2), (100, 9), (100, 1000)])
def test_parts_and_shared_pieces_make_the_whole(threads: int, count: int, size: int) -> None:
    pool, guard = RangePool(threads), threading.Lock()
    parts, pieces = list[tuple[int, int]](), list[tuple[int, int]]()

    def noted(found: list[tuple[int, int]], start: int, stop: int) -> None:
        with guard:
            found.append((start, stop))

    pool.run(partial(noted, parts), count, size)
    pool.share(partial(noted, pieces), count, size)
    pool.close()
    for found in (parts, pieces):
        assert [i for start, stop in sorted(found) for i in range(start, stop)] == list(range(count))
    assert len(parts) <= threads
    assert all(stop - start >= min(size, count) for start, stop in parts)
    assert all(start % size == 0 and stop == min(count, start + size) for start, stop in pieces)


def test_shared_pieces_do_not_wait_for_threads_that_are_busy_elsewhere() -> None:
    done = list[int]()
    with busy_pool() as pool:
        pool.share(lambda start, stop: done.append(start), 5, 1)
        assert done == [0, 1, 2, 3, 4]


def test_errors_of_any_part_or_piece_reach_the_caller() -> None:
    pool = RangePool(3)
    for failing in range(6):

        def work(start: int, stop: int, failing: int = failing) -> None:
            if start <= failing < stop:
                raise ValueError(f"from {start}")

        for share_out in (pool.run, pool.share):
            with pytest.raises(ValueError, match="from"):
                share_out(work, 6, 1)
    pool.close()


def test_threads_end_with_their_pool() -> None:
    def helpers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "rows"}

    before = helpers()
    kept, dropped = RangePool(3), RangePool(3)
    for pool in (kept, dropped):
        pool.run(lambda start, stop: None, 100, 1)
    ours = helpers() - before
    assert len(ours) == 4
    kept.close()
    del pool, dropped
    gc.collect()
    for thread in ours:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_work_may_share_out_work_of_its_own() -> None:
    pool, done = RangePool(2), list[tuple[int, int]]()
    pool.share(lambda start, stop: pool.share(lambda a, b: done.append((start, a)), 4, 1), 8, 1)
    assert sorted(done) == [(start, a) for start in range(8) for a in range(4)]
    pool.close()


def test_a_closed_pool_works_in_the_callers_thread() -> None:
    pool = RangePool(2)
    pool.close()
    pool.close()
    names = list[str]()
    pool.run(lambda start, stop: names.append(threading.current_thread().name), 10, 1)
    SERIAL.run(lambda start, stop: names.append(threading.current_thread().name), 10, 1)
    assert names == [threading.current_thread().name] * 2


def test_readers_share_and_a_writer_is_alone() -> None:
    lock, both_in, inside = ReadersWriterLock(WAIT_S, "the test"), threading.Barrier(2), 0

    def meet() -> None:
        with lock.reading():
            both_in.wait(WAIT_S)  # ends only if both are in at once

    def write() -> None:
        nonlocal inside
        for _ in range(200):
            with lock.writing():
                inside += 1
                assert inside == 1
                inside -= 1

    def read() -> None:
        for _ in range(200):
            with lock.reading():
                assert inside == 0

    on_threads([meet, meet])
    on_threads([write, write, write, read])


def test_waiting_ends() -> None:
    lock = ReadersWriterLock(0.05, "the shelf")
    with (
        lock.reading(),
        pytest.raises(DeadlineExceeded, match=r"to write the shelf; the limit is 0\.05 s"),
        lock.writing(),
    ):
        pass
    with lock.writing():
        with pytest.raises(DeadlineExceeded, match="to read the shelf"), lock.reading():
            pass
        with pytest.raises(DeadlineExceeded, match="to write the shelf"), lock.writing():
            pass
    with lock.reading(), lock.reading():  # a writer that gave up keeps nobody out
        pass


@contextmanager
def busy_pool() -> Iterator[RangePool]:
    """A pool of two threads, one of which does something else for as long as the block lasts."""
    pool, leave, inside = RangePool(2), threading.Event(), threading.Event()

    def hold(start: int, stop: int) -> None:
        if start == 1:  # in the pool's only thread
            inside.set()
            assert leave.wait(WAIT_S)
        else:
            assert inside.wait(WAIT_S)

    busy = threading.Thread(target=pool.run, args=(hold, 2, 1))
    busy.start()
    assert inside.wait(WAIT_S)
    try:
        yield pool
    finally:
        leave.set()
        busy.join(WAIT_S)
        pool.close()
    assert not busy.is_alive()


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
