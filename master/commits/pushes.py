"""Which pushes count, once each, and which are ready to become a version.

Not thread-safe: the master's lock guards it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from elastable.embedding_store.errors import BadGradient, BadInput, FutureVersion
from elastable.master.api import AsyncPushId, DivisorKind, Push, PushOutcome, SyncPushId, TaskKind
from elastable.master.tasks.schedule import Schedule
from elastable.master.tasks.task_board import TaskBoard

__all__ = ["AsyncPushes", "Place", "Sequences", "SyncPushes", "Ticket", "Verdict"]

# Incarnations remembered: more than a job ever has; a bound all the same.
_INCARNATIONS = 65_536

Verdict = tuple[PushOutcome, str]


@dataclass(slots=True)
class Ticket:
    """A push that counts, on its way into a version.

    Attributes:
        push: What was pushed; None: it was skipped, its micro-batch is done.
        id: Its name.
        worker: To whom the micro-batch had been given, if to anyone.
        committed: Whether the version that holds it stands.
    """

    push: Push | None
    id: SyncPushId | AsyncPushId
    worker: str | None = None
    committed: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where an asynchronous job is; see `elastable.master.tasks.progress.Progress`."""

    epoch: int = 0
    done: tuple[int, ...] = ()
    sequences: Mapping[str, int] = field(default_factory=dict)


class Sequences:
    """The last sequence of every worker incarnation."""

    def __init__(self, known: Mapping[str, int]) -> None:
        self._last = OrderedDict(known)

    def knows(self, push_id: AsyncPushId) -> bool:
        """Whether that push, or a later one of that incarnation, was remembered."""
        return push_id.sequence <= self._last.get(push_id.incarnation, 0)

    def remember(self, push_id: AsyncPushId) -> None:
        """Makes that push known."""
        self._last[push_id.incarnation] = max(push_id.sequence, self._last.get(push_id.incarnation, 0))
        self._last.move_to_end(push_id.incarnation)
        while len(self._last) > _INCARNATIONS:
            self._last.popitem(last=False)

    def as_dict(self) -> dict[str, int]:
        """Incarnation -> last sequence."""
        return dict(self._last)


class SyncPushes:
    """Pushes of the version in work, named by (version, micro-batch)."""

    waits = False

    def __init__(self, schedule: Schedule, board: TaskBoard, uneven: bool = False) -> None:
        self._schedule = schedule
        self._uneven = uneven
        self._board = board
        self._tickets: dict[int, Ticket] = {}

    def judge(self, push: Push, version: int) -> Verdict | Ticket | None:
        """What becomes of the push, or None where it is to be taken.

        Raises:
            BadInput: it is no micro-batch of that version.
            FutureVersion: that version has not been committed.
        """
        name = push.id
        if not isinstance(name, SyncPushId):
            raise BadInput("the job is synchronous: a push is named by (version, micro-batch), not by a sequence")
        if name.version < version:
            return PushOutcome.STALE, f"version {name.version} is committed; the current version is {version}"
        if name.version > version:
            raise FutureVersion(f"push for version {name.version}, which is not there; the current one is {version}")
        if self._board.trained:
            return PushOutcome.STALE, f"version {version} is the job's last; nothing is trained on it"
        numbers = self._schedule.micro_batches(version)
        if name.micro_batch not in numbers:
            raise BadInput(
                f"micro-batch {name.micro_batch} is not of version {version}, which is made of "
                f"{numbers.start} to {numbers.stop - 1}"
            )
        if not self._uneven:
            _check_records(self._schedule, push, version, name.micro_batch)
        if name.micro_batch in self._tickets:
            return PushOutcome.DUPLICATE, f"micro-batch {name.micro_batch} was counted before"
        self._refuse_unlike(push)
        return None

    def _refuse_unlike(self, push: Push) -> None:
        """Raises `BadGradient` where the loss is divided otherwise than in the version's other micro-batches."""
        for ticket in self._tickets.values():
            if ticket.push is not None and _kinds(ticket.push) != _kinds(push):
                raise BadGradient(
                    f"micro-batch {push.id.micro_batch} divides its loss by {_told(push)}, and another one of its "
                    f"version by {_told(ticket.push)}: run the same model everywhere"
                )

    def take(self, push: Push, skipped: bool) -> Ticket:
        """Counts a push that `judge` let through."""
        _, worker = self._board.complete(TaskKind.TRAIN, push.id.micro_batch, by=push.incarnation)
        ticket = Ticket(None if skipped else push, push.id, worker)
        self._tickets[push.id.micro_batch] = ticket
        return ticket

    def ready(self) -> list[Ticket] | None:
        """The pushes of the version in work, in micro-batch order, once all are there."""
        if not (self._board.is_open and self._board.training_done):
            return None
        return [self._tickets[number] for number in sorted(self._tickets)]

    def commit(self) -> bool:
        """What was ready is committed; returns whether an epoch has ended."""
        self._tickets = {}
        self._board.advance()
        return self._board.ends_epoch

    def place_after(self) -> Place:
        """Of what is ready, once it is committed: the version says it all."""
        return Place()

    def done(self) -> tuple[int, ...]:
        """Nothing: the version says it all."""
        return ()

    def sequences(self) -> dict[str, int]:
        """Nothing: pushes are named by what they computed."""
        return {}


class AsyncPushes:
    """Pushes in the order of arrival, named by (incarnation, sequence).

    What is known as counted: of a push of a task, its micro-batch, whoever
    computes it and however often; of others, their sequence.
    """

    waits = True

    def __init__(self, schedule: Schedule, board: TaskBoard, known: Mapping[str, int]) -> None:
        self._schedule = schedule
        self._board = board
        self._committed = Sequences(known)
        self._queue: deque[Ticket] = deque()

    def judge(self, push: Push, version: int) -> Verdict | Ticket | None:
        """What becomes of the push: known already (its ticket, if on its way), or None: it is to be taken.

        The micro-batch of one that is too stale is free at once.

        Raises:
            BadInput: the push is named as in a synchronous job, or its
                micro-batch is not of this job.
            FutureVersion: its epoch has not begun, or what it was computed on
                is not there.
        """
        name = push.id
        if not isinstance(name, AsyncPushId):
            raise BadInput("the job is asynchronous: a push is named by (incarnation, sequence), not by a version")
        same = (ticket for ticket in self._queue if ticket.id == name)
        if (ticket := next(same, None)) is not None:
            return ticket
        if name.micro_batch >= 0:
            verdict = self._judge_task(push, name.micro_batch, version)
            if verdict is not None:
                return verdict
        elif self._committed.knows(name):
            return PushOutcome.DUPLICATE, f"sequence {name.sequence} of {name.incarnation!r} was counted before"
        elif push.records < 1:
            raise BadInput(f"a push of {push.records} records: it must have at least one")
        if not self._board.is_open:
            return PushOutcome.STALE, "an epoch has ended: nothing is trained before the next one begins"
        return None if push.computed_on is None else self._judge_age(name, push.computed_on, version)

    def _judge_age(self, name: AsyncPushId, computed_on: int, version: int) -> Verdict | None:
        if computed_on > version:
            raise FutureVersion(f"push computed on version {computed_on}, which is not there; the current is {version}")
        bound = self._schedule.job.staleness_bound
        # Every push that waits makes a version before this one would.
        behind = version + len(self._queue) - computed_on
        if bound is None or behind <= bound:
            return None
        if name.micro_batch >= 0:
            self._board.give_back(name.micro_batch, name.incarnation)
        return (
            PushOutcome.STALE,
            f"computed on version {computed_on}, it would be committed {behind} versions later; the bound is {bound}",
        )

    def _judge_task(self, push: Push, micro_batch: int, version: int) -> Verdict | None:
        if micro_batch >= self._schedule.versions_total:
            raise BadInput(f"micro-batch {micro_batch} is not of this job, which has {self._schedule.versions_total}")
        _check_records(self._schedule, push, version, micro_batch)
        if self._board.was_trained(micro_batch):
            return PushOutcome.DUPLICATE, f"micro-batch {micro_batch} was counted before"
        if micro_batch // self._schedule.micro_batches_per_pass > self._board.place:
            raise FutureVersion(f"micro-batch {micro_batch} is of an epoch that has not begun")
        return None

    def take(self, push: Push, skipped: bool) -> Ticket:
        """Counts a push that `judge` let through."""
        worker = None
        if isinstance(push.id, AsyncPushId) and push.id.micro_batch >= 0:
            _, worker = self._board.complete(TaskKind.TRAIN, push.id.micro_batch, by=push.id.incarnation)
        self._queue.append(Ticket(None if skipped else push, push.id, worker))
        return self._queue[-1]

    def ready(self) -> list[Ticket] | None:
        """The push that came first: every push is a version of its own."""
        return [self._queue[0]] if self._queue else None

    def commit(self) -> bool:
        """What was ready is committed; returns whether an epoch has ended."""
        ticket = self._queue.popleft()
        if isinstance(ticket.id, AsyncPushId):
            self._committed.remember(ticket.id)
        if self._queue or not self._board.training_done:
            return False
        self._board.advance()
        return True

    def place_after(self) -> Place:
        """Of what is ready, once it is committed."""
        first, *others = self._queue
        ends = not others and self._board.training_done
        sequences = self._committed.as_dict()
        if isinstance(first.id, AsyncPushId):
            sequences[first.id.incarnation] = first.id.sequence
        done = () if ends else self._done_but({ticket.id.micro_batch for ticket in others})
        return Place(self._board.place + ends, done, sequences)

    def done(self) -> tuple[int, ...]:
        """Micro-batches of the running epoch that are committed."""
        return self._done_but({ticket.id.micro_batch for ticket in self._queue})

    def _done_but(self, coming: set[int]) -> tuple[int, ...]:
        return tuple(number for number in self._board.done() if number not in coming)

    def sequences(self) -> dict[str, int]:
        """Last committed sequence of every incarnation."""
        return self._committed.as_dict()


def _kinds(push: Push) -> tuple[DivisorKind | None, ...]:
    return (None if push.divisor is None else push.divisor.kind, *(part.divisor.kind for part in push.parts))


def _told(push: Push) -> str:
    return ", ".join(kind or "what the job says" for kind in _kinds(push))


def _check_records(schedule: Schedule, push: Push, version: int, micro_batch: int) -> None:
    task = schedule.task(version, micro_batch)
    if push.records != task.stop - task.start:
        raise BadInput(
            f"micro-batch {micro_batch} has {task.stop - task.start} records, the push says it has {push.records}"
        )
