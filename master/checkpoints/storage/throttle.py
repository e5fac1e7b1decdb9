"""Limits a thread's share of the cores while they are busy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elastable.embedding_store.native.range_pool import available_cores

__all__ = ["Throttle", "cores_are_short"]

_SHARE = 0.12  # of a core
_BUSY = 0.7  # of the cores


def cores_are_short() -> bool:
    """Whether, in the last minute, most cores were asked for."""
    return os.getloadavg()[0] > _BUSY * available_cores()


class Throttle:
    """Pauses behind pieces of work, for as long as it takes to have had an eighth of a core.

    Training keeps all cores of a small machine busy. Low priority alone left it
    0.55 of its speed there while checkpoints were written, as caches and memory
    are shared, too; a quarter of a core 0.73, a tenth 0.87. Where cores are idle
    nothing is waited for.

    Args:
        short: Whether cores are short now.
        sleep: Waits that many seconds.
    """

    def __init__(
        self, short: Callable[[], bool] = cores_are_short, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._short = short
        self._sleep = sleep

    @contextmanager
    def working(self) -> Iterator[None]:
        """A piece of work of the thread."""
        busy = time.thread_time()
        yield
        busy = time.thread_time() - busy
        if self._short():
            self._sleep(busy * (1 / _SHARE - 1))
