"""A thread that looks at something every so often."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_JOIN_S = 5.0


@contextmanager
def repeating(look: Callable[[], bool | None], every_s: float, name: str) -> Iterator[None]:
    """While the block runs, calls `look` in a thread every `every_s` seconds, until it returns True."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(every_s) and not look():
            pass

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=_JOIN_S)
