"""The one retry loop: repeats a call to a server that is away for a while."""

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from elastable.embedding_store.errors import (
    ElastableError,
    ShardAway,
    ShardLost,
    StoreBroken,
    StoreFailed,
    TakenOver,
    Unavailable,
)
from elastable.embedding_store.measures import Counts

_log = logging.getLogger(__name__)

# A separate generator: a program that seeds Python's expects the numbers that follow, even while another thread waits.
_random = random.Random()

RETRIES = Counts()
"""Attempts of this process that another one followed, by the name of their error."""

Answer = TypeVar("Answer")


class Retry:
    """Repeats a call with growing pauses while its errors are transient.

    Each pause is twice the one before, and shortened at random by up to a half: many clients of a server that was away
    do not return all at once.

    Args:
        deadline_s: No attempt starts later than this many seconds after the first.
        transient: Whether another attempt may succeed after an error.
        failed: Called with each error after which another attempt follows.
        attempts: The most attempts; None: as many as the deadline allows.
        first_pause_s, longest_pause_s: Seconds of the first pause and of the longest.
        pause: Waits some seconds; if it returns True there is no other attempt.
        now: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        deadline_s: float,
        transient: Callable[[Exception], bool],
        failed: Callable[[Exception], None] = lambda error: None,
        *,
        attempts: int | None = None,
        first_pause_s: float = 0.05,
        longest_pause_s: float = 2.0,
        pause: Callable[[float], object] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transient, self._failed, self._attempts = transient, failed, attempts
        self._next_pause_s, self._longest_pause_s = first_pause_s, longest_pause_s
        self._pause, self._now = pause, now
        self._end = now() + deadline_s

    def limit(self, seconds: float) -> None:
        """Brings the deadline forward to so many seconds from now, unless it is earlier already."""
        self._end = min(self._end, self._now() + seconds)

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self._end - self._now()

    def call(self, attempt: Callable[[], Answer]) -> Answer:
        """What the first successful attempt returns.

        Raises:
            Exception: an error that is not transient, at once; the last transient one at the deadline.
        """
        made = 0
        while True:
            made += 1
            try:
                return attempt()
            except Exception as error:
                if not self._transient(error):
                    raise
                wait = self._next_pause_s * _random.uniform(0.5, 1.0)
                self._next_pause_s = min(2 * self._next_pause_s, self._longest_pause_s)
                if made == self._attempts or wait >= self.left:
                    raise
                self._failed(error)
                RETRIES.add(type(error).__name__)
                if self._pause(wait):
                    raise


def retry(
    call: Callable[[], Answer],
    what: str,
    deadline_s: float,
    on: tuple[type[ElastableError], ...] = (StoreFailed, Unavailable),
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> Answer:
    """Repeats a call to a store while it fails with one of `on`, and logs that.

    Args:
        call: Safe to repeat after it was carried out and only its answer was lost.
        what: Names the call in the log.
        deadline_s: No attempt starts later than this many seconds after the first.
        on: Errors that another attempt may mend.
        now: Monotonic clock, in seconds.
        sleep: Waits that many seconds.

    Raises:
        ElastableError: the last error of `on` before the deadline, as `given_up` returns it; `StoreBroken`, `TakenOver`
            and any other at once.
    """

    def transient(error: Exception) -> bool:
        return isinstance(error, on) and not isinstance(error, StoreBroken | TakenOver)

    def failed(error: Exception) -> None:
        _log.warning("%s failed, trying again: %s", what, error)

    try:
        return Retry(deadline_s, transient, failed, pause=sleep, now=now).call(call)
    except ElastableError as error:
        if not transient(error) or (lasting := given_up(error, deadline_s)) is error:
            raise
        raise lasting from error


def given_up(error: ElastableError, deadline_s: float) -> ElastableError:
    """The error where no other attempt is made: a shard that stayed away until the deadline is lost."""
    if not isinstance(error, ShardAway):
        return error
    return ShardLost(f"{error}; it is taken for lost, as it stayed away for the deadline of {deadline_s:g} s")
