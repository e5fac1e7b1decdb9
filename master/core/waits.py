"""What workers wait for at a job: tasks, versions, commits. Nothing here blocks: whoever changes the job says so."""

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

from elastable.embedding_store.errors import DeadlineExceeded, ElastableError
from elastable.embedding_store.support.futures import Timer, Timers, settle, settle_error
from elastable.master.api import DenseSnapshot, Lease, PushReply
from elastable.master.commits.push_protocol import Ticket
from elastable.master.core.job_state import JobState

T = TypeVar("T")
P = ParamSpec("P")

_LEAST_S = 0.01  # between two looks


@dataclass(frozen=True, slots=True)
class _Asker:
    want: int
    result: Future[Lease]


@dataclass(frozen=True, slots=True)
class _Pusher:
    ticket: Ticket
    reply: Callable[[bool], PushReply]
    result: Future[PushReply]


class Waits:
    """The calls that wait for a job. The master's lock guards it, and every change of the job.

    Calls are answered once the lock is free again, as answers are sent by whoever sets a result: whatever changes the
    job is done within `changing`.
    """

    def __init__(self, state: JobState, lock: AbstractContextManager[object]) -> None:
        self._state = state
        self._lock = lock
        self._timers = Timers("elastable-waits")
        self._askers: dict[str, _Asker] = {}  # by worker, the one that has waited longest first
        self._full: dict[str, None] = {}  # those that asked for no more than they hold, since the last version
        self._readers: dict[int | None, dict[str, Future[DenseSnapshot | None]]] = {}  # by version and worker
        self._pushers: dict[int, list[_Pusher]] = {}  # by the identity of their ticket
        self._look: Timer | None = None
        self._answers: list[Callable[[], None]] = []  # emptied whenever the lock is given back

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Holds the lock around a change of the job; gives the answers that came of it, without the lock."""
        try:
            with self._lock:
                try:
                    yield
                finally:
                    answers = self._answers[:]
                    self._answers.clear()
        finally:
            for answer in answers:
                answer()

    def for_tasks(self, worker: str, want: int, wait_s: float) -> Future[Lease]:
        """Tasks for a worker that there are none for now; an empty lease where none come in time.

        A worker waits once: its call before is answered without tasks.
        """
        if (before := self._askers.pop(worker, None)) is not None:
            self._settle(before.result, Lease())
        asker = self._askers[worker] = _Asker(want, Future())
        if want <= 0:
            self._full[worker] = None

        def late() -> None:
            with self.changing():
                if self._askers.get(worker) is asker:  # else it has got tasks meanwhile
                    self._settle(self._askers.pop(worker).result, Lease())

        self._until(asker.result, wait_s, late)
        self._look_later()
        return asker.result

    def for_version(self, worker: str, version: int | None, wait_s: float) -> Future[DenseSnapshot | None]:
        """The dense part of a version that is not committed yet; None where it is not in time."""
        if (before := self._readers.get(version, {}).get(worker)) is not None:
            self._settle(before, None)
        result: Future[DenseSnapshot | None] = Future()
        self._readers.setdefault(version, {})[worker] = result
        # Of the result itself, the callback must not hold a reference: that is a cycle.
        result.add_done_callback(partial(self._forget_reader, version, worker))
        self._until(result, wait_s, partial(settle, result, None))
        return result

    def for_commit(self, ticket: Ticket, reply: Callable[[bool], PushReply], wait_s: float) -> Future[PushReply]:
        """The reply to a push, once it is known whether it was committed.

        The result raises `DeadlineExceeded` where that takes longer than `wait_s` seconds.
        """
        result: Future[PushReply] = Future()
        others = [pusher for pusher in self._pushers.get(id(ticket), ()) if not pusher.result.done()]
        self._pushers[id(ticket)] = [*others, _Pusher(ticket, reply, result)]
        late = f"push {ticket.id} was not committed within {wait_s} s; it is safe to repeat"
        self._until(result, wait_s, partial(settle_error, result, DeadlineExceeded(late)))
        return result

    def tasks_free(self) -> None:
        """There may be tasks for somebody; whoever has waited longest is first."""
        if not self._askers:
            return
        answered: list[str] = []  # of a thousand that wait, a few are: the others are not even looked at
        for worker, asker in self._askers.items():
            if not self._state.ending and not self._state.board.offers():
                break
            if asker.result.done():
                answered.append(worker)
                continue
            try:
                lease = self._lease(worker, asker.want)
            except ElastableError as error:
                answered.append(worker)
                self._answers.append(partial(settle_error, asker.result, error))
                continue
            if lease != Lease():
                answered.append(worker)
                self._settle(asker.result, lease)
                self.leased(worker, lease)
        for worker in answered:
            del self._askers[worker]
        self._look_later()

    def left(self, worker: str) -> None:
        """The worker has no session any more."""
        if (asker := self._askers.pop(worker, None)) is not None:
            self._attempt(asker.result, self._lease, worker, asker.want)
        self.tasks_free()

    def leased(self, worker: str, lease: Lease) -> None:
        """The worker has got tasks: where it waits for a later version, it has something to do before."""
        version = self._state.version
        for wanted, readers in self._readers.items() if lease.tasks and min(lease.tasks).version <= version else ():
            if wanted is not None and (waiting := readers.get(worker)) is not None:
                self._settle(waiting, None)

    def published(self, tickets: Iterable[Ticket] = ()) -> None:
        """The state has another snapshot; the commit of these tickets made it."""
        version = self._state.version
        for wanted, readers in self._readers.items():
            if wanted is None or wanted <= version:
                for result in readers.values():
                    self._attempt(result, self._snapshot, wanted)
        for ticket in tickets:
            for pusher in self._pushers.pop(id(ticket), ()):
                self._attempt(pusher.result, pusher.reply, True)
        # These have all tasks that they can hold, and waited for the version of the first.
        full, self._full = self._full, {}
        for worker in full:
            if (asker := self._askers.get(worker)) is not None and asker.want <= 0:
                self._settle(self._askers.pop(worker).result, Lease())

    def lost(self, tickets: Iterable[Ticket]) -> None:
        """These tickets will not be committed, as store servers lost rows of theirs."""
        for ticket in tickets:
            ticket.why_not = "a store server lost its rows: it is computed again"
            for pusher in self._pushers.pop(id(ticket), ()):
                self._attempt(pusher.result, pusher.reply, False)

    def ended(self) -> None:
        """The job is stopping, over, or has failed."""
        askers, self._askers = self._askers, {}
        for worker, asker in askers.items():
            self._attempt(asker.result, self._lease, worker, asker.want)
        for version, readers in self._readers.items():
            for result in readers.values():
                self._attempt(result, self._snapshot, version)
        if not self._state.over and self._state.failure is None:
            return  # what is being committed counts yet
        every, self._pushers = self._pushers, {}
        for pushers in every.values():
            for pusher in pushers:
                self._attempt(pusher.result, self._reply, pusher)

    def _lease(self, worker: str, want: int) -> Lease:
        self._state.refuse_failed()
        return self._state.lease(worker, want, None)

    def _reply(self, pusher: _Pusher) -> PushReply:
        self._state.refuse_failed()
        return pusher.reply(pusher.ticket.committed)

    def _snapshot(self, version: int | None) -> DenseSnapshot | None:
        self._state.refuse_failed()
        return self._state.snapshot_of(version)

    def _settle(self, result: Future[T], value: T) -> None:
        self._answers.append(partial(settle, result, value))

    def _attempt(self, result: Future[T], make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> None:
        """Answers with what `make` makes, or the error that it raises."""
        try:
            self._settle(result, make(*args, **kwargs))
        except ElastableError as error:
            self._answers.append(partial(settle_error, result, error))

    def _forget_reader(self, version: int | None, worker: str, result: Future[DenseSnapshot | None]) -> None:
        with self._lock:
            readers = self._readers.get(version, {})
            if readers.get(worker) is result:
                del readers[worker]
            if not readers:
                self._readers.pop(version, None)

    def _until(self, result: Future[T], wait_s: float, give_up: Callable[[], None]) -> None:
        timer = self._timers.call_at(time.monotonic() + wait_s, give_up)
        result.add_done_callback(lambda _: timer.cancel())

    def _look_later(self) -> None:
        """Looks again for those that wait for tasks, once leases may have ended."""
        if not self._askers or (self._look is not None and not self._look.cancelled):
            return

        def look() -> None:
            with self.changing():
                self.tasks_free()

        self._look = self._timers.call_at(max(self._state.board.next_due(), time.monotonic() + _LEAST_S), look)
