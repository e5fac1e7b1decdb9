"""Actions at given times."""

import threading
import time

from elastable.embedding_store.support.futures import Timers

WAIT_S = 60.0


def test_actions_run_in_the_order_of_their_times() -> None:
    timers, done, ran = Timers("test-timers"), threading.Event(), list[int]()
    now = time.monotonic()
    timers.call_at(now + 0.2, done.set)
    for number in (3, 1, 2):
        timers.call_at(now + number * 0.01, lambda number=number: ran.append(number))  # type: ignore[misc]
    assert done.wait(WAIT_S)
    assert ran == [1, 2, 3]


def test_a_cancelled_timer_is_not_run_and_one_that_fails_stops_no_other() -> None:
    timers, done, ran = Timers("test-timers"), threading.Event(), list[int]()
    now = time.monotonic()
    timers.call_at(now + 0.01, lambda: ran.append(1)).cancel()
    timers.call_at(now + 0.01, lambda: ran[5])
    timers.call_at(now + 0.02, done.set)
    assert done.wait(WAIT_S)
    assert ran == []


def test_cancelled_timers_are_forgotten_long_before_their_time() -> None:
    timers = Timers("test-timers")
    for _ in range(10_000):
        timers.call_at(time.monotonic() + 3_600.0, lambda: None).cancel()
    assert len(timers) < 1_000


def test_the_thread_ends_when_nothing_is_left_and_comes_back() -> None:
    timers = Timers("timers-that-end")
    for _ in range(2):
        done = threading.Event()
        timers.call_at(time.monotonic(), done.set)
        assert done.wait(WAIT_S)
        for thread in threading.enumerate():
            if thread.name == "timers-that-end":
                thread.join(WAIT_S)
        assert not any(thread.name == "timers-that-end" for thread in threading.enumerate())
