"""The pool of threads over ranges, and the readers-writer lock."""

import gc
import threading
from functools import partial

import pytest

from elastable.embedding_store.errors import DeadlineExceeded
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.embedding_store.support.readers_writer_lock import ReadersWriterLock
from tests.embedding_store.native.busy_pool import busy_pool

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
    lock = ReadersWriterLock(WAIT_S, "the test")
    both_in = threading.Barrier(2)

    def read() -> None:
        with lock.reading():
            both_in.wait(WAIT_S)

    other = threading.Thread(target=read)
    other.start()
    read()  # ends only if both are in at once
    other.join(WAIT_S)
    assert not other.is_alive()

    inside = 0

    def write() -> None:
        nonlocal inside
        for _ in range(200):
            with lock.writing():
                inside += 1
                assert inside == 1
                inside -= 1

    writers = [threading.Thread(target=write) for _ in range(3)]
    for writer in writers:
        writer.start()
    for _ in range(200):
        with lock.reading():
            assert inside == 0
    for writer in writers:
        writer.join(WAIT_S)
        assert not writer.is_alive()


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
