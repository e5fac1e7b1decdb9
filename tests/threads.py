"""Threads of a test: all at once, and what one of them raises is raised by the test."""

import threading
from collections.abc import Callable, Sequence

JOIN_S = 60.0
"""Seconds that a test waits for a thread to end."""


def on_threads(works: Sequence[Callable[[], None]], done: threading.Event | None = None) -> None:
    """Runs all of them at once; raises what the first of them raised. `done` is set for those that go on until then."""
    failures: list[BaseException] = []
    started = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        try:
            started.wait(JOIN_S)
            work()
        except BaseException as failure:  # noqa: BLE001 - the test raises it in its own thread
            failures.append(failure)
            if done is not None:
                done.set()

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
