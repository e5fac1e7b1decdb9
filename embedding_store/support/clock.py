"""The time of commits: that of the system when the process began, and from then on what has passed since."""

import logging
import time
from collections.abc import Callable
from threading import Lock

_LOG = logging.getLogger(__name__)
_JUMP_S = 5.0  # by which the system's clock may be set without a word

_PASSING = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # goes on while the machine sleeps


class Clock:
    """Seconds since 1970 (UTC) that never jump: setting the system's clock changes nothing here, and is reported.

    Safe to use from many threads.

    Args:
        system: The system's clock.
        passing: Seconds that never go back.
    """

    def __init__(self, system: Callable[[], float], passing: Callable[[], float]) -> None:
        self._system, self._passing = system, passing
        self._began = system() - passing()
        self._reported = 0.0  # by how much the system's clock was ahead of this one
        self._lock = Lock()

    def now(self) -> float:
        """The time."""
        now = self._began + self._passing()
        ahead = self._system() - now
        with self._lock:
            jump = ahead - self._reported
            if abs(jump) >= _JUMP_S:
                self._reported = ahead
        if abs(jump) >= _JUMP_S:
            _LOG.warning(
                "the system's clock was set %s by %.0f s; for commits of this process it is as late as if it was not",
                "ahead" if jump > 0 else "back",
                abs(jump),
            )
        return now


CLOCK = Clock(lambda: time.time(), lambda: time.clock_gettime(_PASSING))
"""Of this process."""
