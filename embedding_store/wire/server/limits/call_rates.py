"""How many calls a second each client of a server makes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["CallRates"]

_BURST_S = 1.0  # for whose calls a client that was silent has room at once
_REMEMBERED = 4_096  # clients, before those that are within their rate are forgotten


class CallRates:
    """The rates of one server's clients, each a token bucket that holds a second's calls.

    Safe to use from many threads.

    Args:
        most: Calls a second of one client; None: any number.
        clock: Seconds that never go back.
    """

    def __init__(self, most: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._lock = threading.Lock()
        self._paid: dict[str, float] = {}  # client -> the time until which its calls use up its rate

    def take(self, client: str) -> bool:
        """Whether a client may make one more call now, which is then counted."""
        if self._most is None:
            return True
        now, each = self._clock(), 1.0 / self._most
        with self._lock:
            paid = max(now, self._paid.get(client, now)) + each
            if paid > now + max(_BURST_S, each):
                return False
            if client not in self._paid and len(self._paid) >= _REMEMBERED:
                self._paid = {one: until for one, until in self._paid.items() if until > now}
            self._paid[client] = paid
        return True
