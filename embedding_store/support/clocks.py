"""How long this process has compiled kernels."""

import threading
import time

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
