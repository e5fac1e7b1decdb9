"""Clocks of this process: the time of commits, and how long kernels were compiled."""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from numba.core import event


class _CompileClock(event.Listener):  # type: ignore[misc]
    """Runs while any thread compiles; kernels that are loaded from numba's cache do not move it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0  # a kernel that calls others compiles them on the way
        self._since = self._total = 0.0

    def on_start(self, event: object) -> None:
        with self._lock:
            if not self._depth:
                self._since = time.monotonic()
            self._depth += 1

    def on_end(self, event: object) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                self._total += time.monotonic() - self._since

    def seconds(self) -> float:
        with self._lock:
            return self._total + (time.monotonic() - self._since if self._depth else 0.0)


_CLOCK = _CompileClock()
event.register("numba:compile", _CLOCK)


def compile_seconds() -> float:
    """Seconds that kernels were compiled for since this module was loaded, a compilation under way included."""
    return _CLOCK.seconds()


# The time of commits: that of the system when the process began, and from then on what has passed since


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
        self._lock = threading.Lock()

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


CLOCK = Clock(time.time, partial(time.clock_gettime, _PASSING))
"""Of this process."""
