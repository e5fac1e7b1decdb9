"""Results that come later, and actions at given times."""

import heapq
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from itertools import count
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


def at_once(value: T) -> Future[T]:
    """A future that has its result already."""
    done: Future[T] = Future()
    done.set_result(value)
    return done


def settle(future: Future[T], value: T) -> None:
    """Gives a future its result, unless it has one, or was cancelled."""
    with suppress(InvalidStateError):
        future.set_result(value)


def settle_error(future: Future[T], error: BaseException) -> None:
    """Gives a future its error, unless it has a result, or was cancelled."""
    with suppress(InvalidStateError):
        future.set_exception(error)


class DaemonExecutor:
    """Makes calls one after the other in a thread of its own, which starts with the first.

    The thread is a daemon: a call that never ends, as of a reader or of a server that is lost, keeps no process alive,
    where an executor of `concurrent.futures` would. Used by one thread at a time.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[tuple[Callable[[], object], Future[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """What the call returns or raises, once it is made; cancelled where `close` comes first."""
        made: Future[T] = Future()
        self._calls.put((call, made))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return made

    def close(self, wait_s: float = 0.0) -> None:
        """Makes no further call, and waits that many seconds for the one under way."""
        self._closed = True
        self._calls.put(None)
        if self._thread is not None:
            self._thread.join(wait_s)

    def _run(self) -> None:
        while (asked := self._calls.get()) is not None:
            call, made = asked
            if self._closed:
                made.cancel()
            elif made.set_running_or_notify_cancel():
                try:
                    made.set_result(call())
                except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
                    made.set_exception(error)


# Actions at given times, by one thread however many there are


_LOG = logging.getLogger(__name__)
_FEW = 64  # cancelled timers that are not worth removing


class Timer:
    """One action that is due at a time, unless it is cancelled."""

    __slots__ = ("_action", "_timers")

    def __init__(self, timers: "Timers", action: Callable[[], object]) -> None:
        self._timers = timers
        self._action: Callable[[], object] | None = action

    @property
    def cancelled(self) -> bool:
        """Whether the action was run or will never be."""
        return self._action is None

    def cancel(self) -> None:
        """The action is not run, unless it is being run now. Cancelling twice has no effect."""
        if self._take() is not None:
            self._timers._count_cancelled()

    def _take(self) -> Callable[[], object] | None:
        action, self._action = self._action, None
        return action


class Timers:
    """Runs actions at their times, one after the other: they must be short. Safe to use from many threads.

    The thread ends when nothing is left to time, and starts again when there is.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Timer]] = []
        self._numbers = count()
        self._cancelled = 0
        self._running = False

    def call_at(self, when: float, action: Callable[[], object]) -> Timer:
        """Runs `action` at `when`, in seconds of `time.monotonic`."""
        timer = Timer(self, action)
        with self._changed:
            first = not self._due or when < self._due[0][0]
            heapq.heappush(self._due, (when, next(self._numbers), timer))
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            elif first:
                self._changed.notify()
        return timer

    def __len__(self) -> int:
        """Timers that are remembered: those that are due later, and some that were cancelled."""
        return len(self._due)

    def _count_cancelled(self) -> None:
        with self._changed:
            self._cancelled += 1
            if self._cancelled > max(_FEW, len(self._due) // 2):
                self._due = [entry for entry in self._due if not entry[2].cancelled]
                heapq.heapify(self._due)
                self._cancelled = 0

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._due and self._due[0][2].cancelled:
                    heapq.heappop(self._due)
                    self._cancelled = max(0, self._cancelled - 1)
                if not self._due:
                    self._running = False
                    return
                left = self._due[0][0] - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                timer = heapq.heappop(self._due)[2]
            action = timer._take()
            if action is None:
                continue
            try:
                action()
            except Exception:  # noqa: BLE001 - the others are run all the same
                _LOG.exception("%s: a timed action failed", self._name)
