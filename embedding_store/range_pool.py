"""Splitting a range of rows over threads that run kernels without the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache
from itertools import count as numbers

from embedding_store.errors import StoreFailed

__all__ = ["SERIAL", "RangePool", "available_cores", "shared_pool"]

_MOST_SHARED = 8
_DEADLINE_S = 600.0  # kernels are finite; this only keeps a dead thread from hanging its caller


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class RangePool:
    """Threads that live as long as their owner; one thread means the caller's own.

    numba's own thread layers are not used: its default one may not be entered
    from several Python threads at once, as a server does.
    """

    def __init__(self, threads: int = 1) -> None:
        self.threads = max(1, threads)
        # The caller works too, so one thread fewer is started, and those only when first needed.
        self._executor = ThreadPoolExecutor(self.threads - 1, thread_name_prefix="rows") if self.threads > 1 else None

    def run(self, work: Callable[[int, int], None], count: int, minimum: int) -> None:
        """Calls `work(start, stop)` on ranges that together are `0..count`.

        Args:
            work: Must give the same result wherever the range is cut.
            count: Length of the whole range.
            minimum: A range is not cut into parts shorter than this.

        Raises:
            StoreFailed: a thread did not end. Errors of `work` pass through,
                after every part has ended.
        """
        parts = min(self.threads, count // max(1, minimum))
        if parts <= 1 or self._executor is None:
            work(0, count)
            return
        bounds = [count * part // parts for part in range(parts + 1)]
        futures = [self._executor.submit(work, bounds[part], bounds[part + 1]) for part in range(1, parts)]
        try:
            work(0, bounds[1])
        finally:
            unfinished = wait(futures, timeout=_DEADLINE_S).not_done
        _finish(futures, len(unfinished))

    def share(self, work: Callable[[int, int], None], count: int, piece: int) -> None:
        """As `run`, in pieces that threads take as they come free, so that one that starts late takes fewer.

        Args:
            work: Must give the same result wherever the range is cut.
            count: Length of the whole range.
            piece: Length of a piece; the last may be shorter.

        Raises:
            StoreFailed: a thread did not end. Errors of `work` pass through,
                after every thread has ended.
        """
        pieces = -(-count // piece)
        if pieces <= 1:
            work(0, count)
            return
        turns = numbers()

        def take() -> None:
            turn = next(turns)  # one step of the interpreter: no two threads get the same
            while turn < pieces:
                work(turn * piece, min(count, (turn + 1) * piece))
                turn = next(turns)

        helpers = min(self.threads, pieces) - 1
        executor = self._executor
        futures = [executor.submit(take) for _ in range(helpers)] if executor is not None else []
        try:
            take()
        finally:
            # Whoever has not begun by now has nothing left to do.
            begun = [future for future in futures if not future.cancel()]
            unfinished = wait(begun, timeout=_DEADLINE_S).not_done
        _finish(begun, len(unfinished))

    def close(self) -> None:
        """Ends the threads; afterwards everything runs in the caller's own."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True, cancel_futures=False)


def _finish(futures: list[Future[None]], unfinished: int) -> None:
    if unfinished:
        raise StoreFailed(f"{unfinished} of {len(futures)} threads did not end within {_DEADLINE_S:.0f} s")
    for future in futures:
        future.result(timeout=0)


SERIAL = RangePool(1)
"""Everything in the caller's thread."""


@lru_cache(maxsize=1)
def shared_pool() -> RangePool:
    """The process's own threads, one a core and at most 8, for what belongs to no store."""
    return RangePool(min(available_cores(), _MOST_SHARED))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=shared_pool.cache_clear)  # threads do not survive a fork
