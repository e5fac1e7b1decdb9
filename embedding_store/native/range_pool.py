"""Splitting a range of rows over threads that run kernels without the GIL.

The threads are our own. `concurrent.futures` makes a future with a condition and two locks for each part, and takes as
long to hand half a lookup over and back as to fold a thousand bags. numba's thread layers may not all be entered from
several Python threads at once, as a server does.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import count as numbers
from itertools import pairwise
from queue import SimpleQueue

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.native.intrinsics import adding
from elastable.embedding_store.native.kernel import kernel

# A work-stealing counter shared by kernels on several threads


_NEXT, _INSIDE, _FAILED, _THREADS = range(4)
_WORDS = 8  # a cache line
_LOOKS = 20_000  # some tens of microseconds
_SLEEP_S = 50e-6


class WorkCounter:
    """Counts the pieces that the kernels of one job have taken.

    Attributes:
        state: int64, for `join_work`, `next_pieces`, `fail_work` and `leave_work`.
    """

    def __init__(self, threads: int) -> None:
        """`threads`: how many may take part."""
        self.state: Int64 = np.zeros(_WORDS, np.int64)
        self.state[_THREADS] = threads

    @property
    def failed(self) -> bool:
        """Whether any kernel called `fail_work`; known once `wait` has returned."""
        return bool(self.state[_FAILED])

    def wait(self) -> None:
        """Returns when no kernel is working; for a caller whose own kernel has found no pieces left.

        Raises:
            StoreFailed: a thread did not finish its pieces.
        """
        end = 0.0
        while not _nobody_inside(self.state, _LOOKS):
            end = end or time.monotonic() + _DEADLINE_S
            if time.monotonic() > end:
                raise StoreFailed(f"a thread did not finish its pieces within {_DEADLINE_S:.0f} s")
            time.sleep(_SLEEP_S)


_add_next, _add_inside, _add_failed = (
    adding(word, order) for word, order in ((_NEXT, "monotonic"), (_INSIDE, "seq_cst"), (_FAILED, "monotonic"))
)


@kernel
def join_work(state: Int64) -> None:
    """Makes `WorkCounter.wait` wait for this kernel."""
    _add_inside(state, 1)


@kernel
def next_pieces(state: Int64, total: int) -> tuple[int, int]:
    """Pieces for a kernel that has joined: the first, and the one behind the last; no other kernel gets them.

    Both are `total`, the number of all pieces, when none are left.
    """
    left = total - _add_next(state, 0)
    count = max(1, left // (2 * state[_THREADS]))
    first = min(total, _add_next(state, count))
    return first, min(total, first + count)


@kernel
def fail_work(state: Int64) -> None:
    """Marks the job as failed; called before `leave_work`."""
    _add_failed(state, 1)


@kernel
def leave_work(state: Int64) -> None:
    """Whoever waited sees everything that this kernel wrote."""
    _add_inside(state, -1)


@kernel
def _nobody_inside(state: Int64, looks: int) -> bool:
    inside = _add_inside(state, 0)
    while inside and looks:
        inside = _add_inside(state, 0)
        looks -= 1
    return bool(inside == 0)


_MOST_SHARED = 8
FOUND_A_THREAD = 1 << 14
_DEADLINE_S = 600.0  # kernels are finite; this only keeps a dead thread from hanging its caller

_Work = Callable[[int, int], None]


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class RangePool:
    """Threads that live as long as their owner; one thread means the caller's own."""

    def __init__(self, threads: int = 1) -> None:
        self.threads = max(1, threads)
        self._starting = threading.Lock()
        self._queue: _Queue | None = None  # the caller works too, so helpers are started when first needed
        self._closed = False

    def run(self, work: _Work, count: int, minimum: int) -> None:
        """Calls `work(start, stop)` on ranges that together are `0..count`, about one a thread.

        Args:
            work: Must give the same result wherever the range is cut.
            count: Length of the whole range.
            minimum: A range is not cut into parts shorter than this.

        Raises:
            StoreFailed: a thread did not end. An error of `work` passes through, after every part has ended.
        """
        parts = 1 if self._closed else min(self.threads, count // max(1, minimum))
        self._do(work, [count * part // parts for part in range(parts + 1)] if parts > 1 else [0, count])

    def share(self, work: _Work, count: int, piece: int) -> None:
        """As `run`, in pieces that threads take as they come free, so that one that starts late takes fewer.

        Args:
            work: Must give the same result wherever the range is cut.
            count: Length of the whole range.
            piece: Length of a piece; the last may be shorter.

        Raises:
            StoreFailed: a thread did not end. An error of `work` passes
                through, after every piece that was begun has ended.
        """
        self._do(work, [*range(0, count, piece), count] if count > piece else [0, count])

    def together(self, work: Callable[[], object], counter: WorkCounter) -> None:
        """Calls `work()` in the caller's thread, and in others as they come free; returns when all pieces are done.

        Args:
            work: Joins `counter`, takes pieces until none are left, and leaves.
            counter: Of this work.

        Raises:
            StoreFailed: a thread did not finish its pieces. An error of `work` in the caller's thread passes through,
                after the other threads have finished theirs; an error of another thread before it joins is ignored.
        """
        queue = self._helpers() if self.threads > 1 else None
        if queue is None:
            work()
            return
        job = _SharedWork(work)
        for _ in range(self.threads - 1):
            queue.put(job)
        try:
            work()
        finally:
            counter.wait()
            job.over()

    def close(self) -> None:
        """Ends the threads; afterwards everything runs in the caller's own."""
        with self._starting:
            self._closed = True
            if self._queue is not None:
                _dismiss(self._queue, self.threads - 1)
                self._queue = None

    def _do(self, work: _Work, bounds: Sequence[int]) -> None:
        helpers = min(self.threads, len(bounds) - 1) - 1
        queue = self._helpers() if helpers > 0 else None
        if queue is None:
            for start, stop in pairwise(bounds):
                work(start, stop)
            return
        job = _Job(work, bounds)
        for _ in range(helpers):
            queue.put(job)
        job.take()
        job.wait()

    def _helpers(self) -> "_Queue | None":
        """Where helpers take jobs from, once they run; None: there are none."""
        if self._queue is None and self.threads > 1:
            with self._starting:
                if self._queue is None and not self._closed:
                    queue: _Queue = SimpleQueue()
                    for _ in range(self.threads - 1):
                        threading.Thread(target=_help, args=(queue,), name="rows", daemon=True).start()
                    weakref.finalize(self, _dismiss, queue, self.threads - 1)
                    self._queue = queue
        return self._queue


class _Job:
    """Pieces of work, each taken once by whichever thread comes first.

    A helper that comes when all pieces are taken does nothing, so nobody waits for it.
    """

    __slots__ = ("_bounds", "_done", "_ended", "_failure", "_numbers", "_work")

    def __init__(self, work: _Work, bounds: Sequence[int]) -> None:
        self._work, self._bounds = work, bounds
        # One step of the interpreter each: no two threads get the same number.
        self._numbers, self._ended = numbers(), numbers(1)
        self._failure: BaseException | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def take(self) -> None:
        """Does pieces until none is left."""
        bounds, pieces = self._bounds, len(self._bounds) - 1
        while (piece := next(self._numbers)) < pieces:
            try:
                if self._failure is None:
                    self._work(bounds[piece], bounds[piece + 1])
            except BaseException as error:  # noqa: BLE001 - raised by `wait`, in the caller's thread
                self._failure = error
            if next(self._ended) == pieces:
                self._done.release()

    def wait(self) -> None:
        """Returns when every piece has ended; raises what one of them raised."""
        if not self._done.acquire(timeout=_DEADLINE_S):
            raise StoreFailed(f"a thread did not end its part of {self._bounds[-1]} within {_DEADLINE_S:.0f} s")
        if self._failure is not None:
            raise self._failure


class _SharedWork:
    """Work whose threads share a counter. A helper that comes when it is over does nothing and keeps nothing alive."""

    __slots__ = ("_work",)

    def __init__(self, work: Callable[[], object]) -> None:
        self._work: Callable[[], object] | None = work

    def take(self) -> None:
        """Takes pieces until none is left."""
        work = self._work
        if work is not None:
            with suppress(Exception):  # it has taken no piece then: the caller does them all, and fails likewise
                work()

    def over(self) -> None:
        """Lets go of what the caller works on."""
        self._work = None


_Queue = SimpleQueue[_Job | _SharedWork | None]


def _help(queue: _Queue) -> None:
    while (job := queue.get()) is not None:
        job.take()
        del job  # it holds what its caller works on


def _dismiss(queue: _Queue, helpers: int) -> None:
    for _ in range(helpers):
        queue.put(None)


def find_all(find: Callable[[Int64, Int64], int], ids: Int64, positions: Int64, pool: RangePool) -> int:
    """As `find(ids, positions)`, which is `RowDirectory.find`, by all threads of a pool."""
    missing: list[int] = []

    def some(start: int, stop: int) -> None:
        missing.append(find(ids[start:stop], positions[start:stop]))

    pool.run(some, len(ids), FOUND_A_THREAD)
    return sum(missing)


SERIAL = RangePool(1)
"""Everything in the caller's thread."""


@lru_cache(maxsize=1)
def shared_pool() -> RangePool:
    """The process's own threads, one a core and at most 8, for what belongs to no store."""
    return RangePool(min(available_cores(), _MOST_SHARED))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=shared_pool.cache_clear)  # threads do not survive a fork
