"""Calls to a store that is away for a while."""

from __future__ import annotations

import logging

import pytest

from elastable.embedding_store.errors import BadInput, ElastableError, StoreBroken, StoreFailed, TakenOver, Unavailable
from elastable.embedding_store.support.retry import retry


class Away:
    """Fails a few times, and then answers."""

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
