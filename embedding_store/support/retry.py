"""The one retry loop: a call to a server that is away for a while, made again until it answers."""

from __future__ import annotations

import logging
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

__all__ = ["given_up", "retry"]

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0

Answer = TypeVar("Answer")


def retry(
    call: Callable[[], Answer],
    what: str,
    deadline_s: float,
    on: tuple[type[ElastableError], ...] = (StoreFailed, Unavailable),
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Answer:
    """Makes a call, and repeats it with growing pauses while it fails with one of `on`.

    Args:
        call: Safe to repeat after it was carried out and only its answer was lost.
        what: Names the call in the log.
        deadline_s: No attempt starts later than this many seconds after the first.
        on: Errors that another attempt may mend.
        now: Monotonic clock, in seconds.
        sleep: Waits that many seconds.

    Raises:
        ElastableError: the last error of `on` before the deadline, as `given_up` tells it; `StoreBroken`, `TakenOver`
            and any other at once.
    """
    give_up = now() + deadline_s
    pause = _FIRST_PAUSE_S
    while True:
        try:
            return call()
        except (StoreBroken, TakenOver):
            raise
        except on as error:
            if now() + pause > give_up:
                if (lasting := given_up(error, deadline_s)) is error:
                    raise
                raise lasting from error
            _log.warning("%s failed, trying again: %s", what, error)
        sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def given_up(error: ElastableError, deadline_s: float) -> ElastableError:
    """What an error is where no other attempt is made: a shard that stayed away until the deadline is lost."""
    if not isinstance(error, ShardAway):
        return error
    return ShardLost(f"{error}; it is taken for lost, as it stayed away for the deadline of {deadline_s:g} s")
