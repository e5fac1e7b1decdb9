"""Calls to a store that is away for a while."""

import logging

import pytest

from elastable.embedding_store.errors import BadInput, ElastableError, StoreBroken, StoreFailed, TakenOver, Unavailable
from elastable.embedding_store.support.retry import RETRIES, Retry, retry


class Away:
    def __init__(self, *failures: ElastableError) -> None:
        self.failures = list(failures)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        return "here"


def test_a_store_that_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    away = Away(Unavailable("redis at 1.2.3.4 broke"), StoreFailed("full"))
    with caplog.at_level(logging.WARNING):
        assert retry(away, "pinning a version", 30.0) == "here"
    assert away.calls == 3
    assert caplog.messages == [
        "pinning a version failed, trying again: redis at 1.2.3.4 broke",
        "pinning a version failed, trying again: full",
    ]


def test_what_is_tried_again_is_counted_by_error() -> None:
    class AwayHere(Unavailable):  # a client of an earlier test may still try again, and counts, too
        pass

    class FullHere(StoreFailed):
        pass

    retry(Away(AwayHere("away"), AwayHere("away"), FullHere("full")), "a call", 30.0)
    with pytest.raises(BadInput):
        retry(Away(BadInput("wrong")), "a call", 30.0)
    counted = RETRIES.by_name()
    assert (counted["AwayHere"], counted["FullHere"]) == (2, 1)
    assert "BadInput" not in counted


def test_a_store_that_stays_away() -> None:
    with pytest.raises(Unavailable, match="still"):
        retry(Away(*[Unavailable("away")] * 2, *[Unavailable("still away")] * 1000), "a call", 0.3)


@pytest.mark.parametrize("kind", [BadInput, StoreBroken, TakenOver])
def test_what_no_repetition_mends_is_raised_at_once(kind: type[ElastableError]) -> None:
    error = kind("no such table")
    away = Away(error)
    with pytest.raises(type(error), match="no such table"):
        retry(away, "a call", 30.0)
    assert away.calls == 1


class Clock:
    """Time that passes only in pauses."""

    def __init__(self) -> None:
        self.time = 0.0
        self.pauses: list[float] = []

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.time += seconds


def transient(error: Exception) -> bool:
    return isinstance(error, Unavailable)


def test_pauses_grow_within_their_jitter_until_the_deadline() -> None:
    clock, away = Clock(), Away(*[Unavailable("away")] * 1000)
    with pytest.raises(Unavailable):
        Retry(10.0, transient, longest_pause_s=1.0, pause=clock.pause, now=lambda: clock.time).call(away)
    assert 9.0 < clock.time <= 10.0
    assert away.calls == len(clock.pauses) + 1
    for number, pause in enumerate(clock.pauses):
        longest = min(0.05 * 2**number, 1.0)
        assert longest / 2 <= pause <= longest
    assert len({pause / min(0.05 * 2**number, 1.0) for number, pause in enumerate(clock.pauses)}) > 5


def test_attempts_may_be_counted_and_the_deadline_brought_forward() -> None:
    clock, away, failed = Clock(), Away(*[Unavailable("away")] * 1000), list[Exception]()
    with pytest.raises(Unavailable):
        Retry(1e9, transient, failed.append, attempts=4, pause=clock.pause).call(away)
    assert (away.calls, len(failed), len(clock.pauses)) == (4, 3, 3)
    limited = Retry(1e9, transient, pause=clock.pause, now=lambda: clock.time)
    limited.limit(2.0)
    limited.limit(50.0)  # later than it is already
    begun = clock.time
    with pytest.raises(Unavailable):
        limited.call(away)
    assert clock.time - begun <= 2.0


def test_a_pause_may_end_it() -> None:
    away = Away(*[Unavailable("away")] * 1000)
    with pytest.raises(Unavailable):
        Retry(1e9, transient, pause=lambda seconds: True).call(away)
    assert away.calls == 1
