"""A replica group whose members are threads of this process."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from elastable.embedding_store.contract.arrays import UInt8
from elastable.embedding_store.errors import BadInput, DeadlineExceeded, ElastableError, Unavailable
from elastable.replicas.groups.group import ReplicaGroup

Result = TypeVar("Result")


class _Fate:
    """Who has left, shared by a group and its subgroups, with one condition."""

    def __init__(self, deadline_s: float) -> None:
        self.changed = threading.Condition()
        self.gone: dict[int, str] = {}
        self.deadline_s = deadline_s


class _Meeting:
    """Where the members of one group meet; offers stay until all members have read them."""

    def __init__(self, fate: _Fate, ranks: Sequence[int]) -> None:
        self.fate = fate
        self.ranks = tuple(ranks)
        self.offers: list[tuple[str, Sequence[UInt8]]] = [("", ())] * len(ranks)
        self.parts: dict[tuple[int, ...], _Meeting] = {}
        self._here: set[int] = set()
        self._round = 0
        self._failure: ElastableError | None = None

    def meet(self, rank: int, what: str) -> None:
        """Returns once all members have called it, or raises as `ReplicaGroup` describes."""
        changed = self.fate.changed
        with changed:
            self._require_whole()
            self._here.add(rank)
            this = self._round
            if len(self._here) == len(self.ranks):
                self._here.clear()
                self._round += 1
                changed.notify_all()
                return
            changed.wait_for(lambda: self._round != this or self._lost(), self.fate.deadline_s)
            if self._round != this:
                return
            if not self._lost():
                missing = [self.ranks[place] for place in range(len(self.ranks)) if place not in self._here]
                self._fail(
                    DeadlineExceeded(
                        f"{what}: rank {', '.join(map(str, missing))} has not come within {self.fate.deadline_s:g} s"
                    )
                )
            self._require_whole()

    def agree(self) -> None:
        """Raises BadInput unless all members offer the same collective."""
        said = [entry[0] for entry in self.offers]
        for place, other in enumerate(said):
            if other != said[0]:
                raise BadInput(f"rank {self.ranks[0]} calls {said[0]}, and rank {self.ranks[place]} {other}")

    def _lost(self) -> bool:
        return self._failure is not None or any(rank in self.fate.gone for rank in self.ranks)

    def _require_whole(self) -> None:
        for rank in self.ranks:
            if self._failure is None and rank in self.fate.gone:
                self._fail(Unavailable(f"rank {rank} has left the group: {self.fate.gone[rank]}"))
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)

    def _fail(self, failure: ElastableError) -> None:
        if self._failure is None:
            self._failure = failure
            self.fate.changed.notify_all()


class ThreadGroup(ReplicaGroup):
    """A member of a group of threads; `run_threads` makes them."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        super().__init__(rank, meeting.ranks)
        self._meeting = meeting

    def leave(self, why: str) -> None:
        with self._meeting.fate.changed:
            self._meeting.fate.gone.setdefault(self.ranks[self.rank], why)
            self._meeting.fate.changed.notify_all()

    def _exchange(self, what: str, send: Sequence[UInt8], receive: Sequence[UInt8]) -> None:
        with self._offering(what, send):
            for into, (_, blocks) in zip(receive, self._meeting.offers, strict=True):
                into[:] = blocks[self.rank]
        self._meeting.offers[self.rank] = ("", ())

    def _part(self, what: str, members: Sequence[int]) -> ReplicaGroup:
        meeting = self._meeting
        with self._offering(what, ()), meeting.fate.changed:
            part = meeting.parts.setdefault(
                tuple(members), _Meeting(meeting.fate, [self.ranks[member] for member in members])
            )
        if self.rank == members[0]:
            del meeting.parts[tuple(members)]
        return ThreadGroup(members.index(self.rank), part)

    @contextmanager
    def _offering(self, what: str, send: Sequence[UInt8]) -> Iterator[None]:
        """The block begins once all members offer the same, and nobody goes on before all have left it."""
        meeting = self._meeting
        meeting.offers[self.rank] = (what, send)
        meeting.meet(self.rank, what)
        try:
            meeting.agree()
            yield
        finally:
            meeting.meet(self.rank, what)  # inputs may be reused; nobody offers or creates more before all have seen it


def alone(deadline_s: float = 60.0) -> ReplicaGroup:
    """A group of one, to run code for replicas without any."""
    return ThreadGroup(0, _Meeting(_Fate(deadline_s), range(1)))


def run_threads(size: int, work: Callable[[ReplicaGroup], Result], deadline_s: float = 60.0) -> list[Result]:
    """Runs `work` in a group of threads.

    Args:
        work: Called in each thread with that member's view of the group.
        deadline_s: Seconds that a member waits for the others.

    Returns:
        What `work` returned, by rank.

    Raises:
        BadInput: a size below 1.
        Exception: that of the first member that failed on its own.
    """
    if size < 1:
        raise BadInput(f"a replica group needs at least 1 member, got {size}")
    fate = _Fate(deadline_s)
    meeting = _Meeting(fate, range(size))
    results: dict[int, Result] = {}
    failures: list[tuple[float, bool, BaseException]] = []

    def run(rank: int) -> None:
        group = ThreadGroup(rank, meeting)
        try:
            results[rank] = work(group)
        except BaseException as error:  # noqa: BLE001 - raised again below
            caused = isinstance(error, Unavailable)  # usually caused by another's failure
            failures.append((time.monotonic(), caused, error))
            group.leave(f"{type(error).__name__}: {error}")
        else:
            group.leave("its work is done")

    threads = [threading.Thread(target=run, args=(rank,), name=f"replica-{rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise min(failures, key=lambda failure: (failure[1], failure[0]))[2]
    return [results[rank] for rank in range(size)]
