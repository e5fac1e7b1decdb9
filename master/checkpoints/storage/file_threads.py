"""Files read and written by a few threads, in bounded memory."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

__all__ = ["BoundedPool", "in_order"]

T = TypeVar("T")
R = TypeVar("R")

_THREADS = 2
_NICE = 10


def _give_way() -> None:
    """Lets other threads go first. Only Linux has priorities of threads; elsewhere it would be the whole process."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def in_order(work: Callable[[T], R], items: Iterable[T], threads: int = _THREADS) -> Iterator[R]:
    """`work(item)` of every item, in their order, done by threads that are one item each ahead.

    Raises:
        Exception: what `work` raised, in its place.
    """
    with ThreadPoolExecutor(threads, "elastable-checkpoint") as pool:
        waiting: deque[Future[R]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


class BoundedPool(Generic[R]):
    """Runs work in threads; at most one item more than there are threads is pending.

    Used as a context, which waits for all of it at its end.

    Args:
        background: Whether training continues meanwhile: then it is one thread of low
            priority. Its work must not hold a lock that training needs.
    """

    def __init__(self, background: bool = False) -> None:
        self._threads = 1 if background else _THREADS
        self._pool = ThreadPoolExecutor(
            self._threads, "elastable-checkpoint", initializer=_give_way if background else None
        )
        self._waiting: deque[Future[R]] = deque()
        self.results: list[R] = []
        """The results, in the order of submission; complete after `wait`."""

    def do(self, work: Callable[[], R]) -> None:
        """Submits work, once there is room. Raises what earlier work raised."""
        if len(self._waiting) > self._threads:
            self.results.append(self._waiting.popleft().result())
        self._waiting.append(self._pool.submit(work))

    def wait(self) -> list[R]:
        """All results, once all is done. Raises what work raised."""
        while self._waiting:
            self.results.append(self._waiting.popleft().result())
        return self.results

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for future in self._waiting:
            future.cancel()
        self._pool.shutdown(wait=True)
