"""A call to a store that is away for a while, made again until it answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from elastable.embedding_store.errors import StoreBroken, StoreFailed, Unavailable

__all__ = ["patiently"]

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0

Answer = TypeVar("Answer")


def patiently(
    call: Callable[[], Answer],
    what: str,
    deadline_s: float,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Answer:
    """Makes a call, and makes it again with growing pauses while the store fails.

    Args:
        call: May be made again though it was carried out and only its answer was lost.
        what: It does, for the log.
        deadline_s: No new attempt is made after that many seconds.
        now: Monotonic clock, in seconds.
        sleep: Waits that many seconds.

    Raises:
        StoreFailed, Unavailable: the last failure before the deadline.
        ElastableError: any other, at once, and `StoreBroken`.
    """
    give_up = now() + deadline_s
    pause = _FIRST_PAUSE_S
    while True:
        try:
            return call()
        except StoreBroken:
            raise
        except (StoreFailed, Unavailable) as error:
            if now() + pause > give_up:
                raise
            _log.warning("%s failed, trying again: %s", what, error)
        sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
