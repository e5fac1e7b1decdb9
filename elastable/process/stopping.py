"""Ctrl-C and SIGTERM: a clean end first, an end at once when asked again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console

__all__ = ["SIGNAL_REASONS", "stopping_on_signals"]

SIGNAL_REASONS = {int(signal.SIGINT): "interrupted", int(signal.SIGTERM): "terminated"}


@contextmanager
def stopping_on_signals(stop: Callable[[str], None], console: Console, after: str = "this version") -> Iterator[None]:
    """Calls `stop` with a reason at the first signal; the second one ends the process as usual.

    `stop` is called in a separate thread: the signal may have interrupted whoever holds the lock that it needs. `after`
    says for people when that is.
    """
    before: dict[int, signal._HANDLER] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(number, before[number])
        console.print(f"stopping after {after}; once more to stop at once")
        threading.Thread(target=stop, args=(SIGNAL_REASONS[number],), daemon=True).start()

    for number in SIGNAL_REASONS:
        before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
