"""Ctrl-C, SIGTERM and `| head`: a clean end first, an end at once when asked again."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console

OUTPUT_CLOSED = "cut off from the reader of its output"
SIGNAL_REASONS = {
    int(signal.SIGINT): "interrupted",
    int(signal.SIGTERM): "terminated",
    int(signal.SIGPIPE): OUTPUT_CLOSED,
}
_stops: list[Callable[[str], None]] = []  # of the blocks that run, the innermost last


class OutputConsole(Console):
    """A console on standard output; where its reader has gone (`| head`), the process ends as other commands do."""

    def on_broken_pipe(self) -> None:
        """Called by rich."""
        self.quiet = True
        end_without_reader()


def end_without_reader() -> None:
    """What SIGPIPE does to other commands: the exit code of that signal, and no word on standard output.

    What runs within `stopping_on_signals` ends cleanly first. The signal itself stays ignored, as Python has it: it
    would also come of a socket whose other end has gone.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    if not _stops:
        raise SystemExit(128 + signal.SIGPIPE)
    _in_a_thread(_stops[-1], OUTPUT_CLOSED)


def _in_a_thread(stop: Callable[[str], None], reason: str) -> None:
    threading.Thread(target=stop, args=(reason,), daemon=True).start()


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
        _in_a_thread(stop, SIGNAL_REASONS[number])

    for number in (int(signal.SIGINT), int(signal.SIGTERM)):
        before[number] = signal.signal(number, handle)
    _stops.append(stop)
    try:
        yield
    finally:
        _stops.remove(stop)
        for number, handler in before.items():
            signal.signal(number, handler)
