"""What sync and async mode decide differently: leases, names of pushes, when a version is due, what is resumed."""

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from elastable.embedding_store.errors import BadGradient, BadInput, FutureVersion
from elastable.embedding_store.shards.version_sums import require_sequence
from elastable.master.api import AsyncPushId, BadEvent, DivisorKind, Push, PushId, PushOutcome, SyncPushId, TaskKind
from elastable.master.master_options import MasterOptions
from elastable.master.tasks.progress import Progress
from elastable.master.tasks.schedule import Schedule
from elastable.master.tasks.task_board import TaskBoard

# Incarnations remembered: more than a job ever has, and still a bound.
_INCARNATIONS = 65_536

NO_TASK = -1
"""The micro-batch of an asynchronous push that is of no task."""

Verdict = tuple[PushOutcome, str]


@dataclass(slots=True)
class Ticket:
    """A push that counts, on its way into a version.

    Attributes:
        push: The push; None: it was skipped, its micro-batch is done.
        worker: The worker that the micro-batch was leased to, if any.
        bad_events: `Push.bad_events`.
        committed: Whether the version that contains it is committed.
        why_not: Why it is not, for its sender.
    """

    push: Push | None
    id: PushId
    worker: str | None = None
    bad_events: tuple[BadEvent, ...] = ()
    committed: bool = False
    why_not: str = "the job ended before the push was committed"


class Sequences:
    """The last sequence of every worker incarnation."""

    def __init__(self, known: Mapping[str, int]) -> None:
        self._last = OrderedDict(known)

    def last(self, incarnation: str) -> int:
        """The last one that was remembered; 0: none was."""
        return self._last.get(incarnation, 0)

    def remember(self, push_id: AsyncPushId) -> None:
        """Remembers that push."""
        self._last[push_id.incarnation] = max(push_id.sequence, self._last.get(push_id.incarnation, 0))
        self._last.move_to_end(push_id.incarnation)
        while len(self._last) > _INCARNATIONS:
            self._last.popitem(last=False)

    def as_dict(self) -> dict[str, int]:
        """Incarnation -> last sequence."""
        return dict(self._last)


class PushProtocol(ABC):
    """How pushes become versions, from the lease of a micro-batch to what a checkpoint keeps.

    A job chooses one of the implementations when it starts. Not thread-safe: the master's lock guards it.

    Attributes:
        board: Leases the job's micro-batches.
    """

    replies_after_commit: bool
    """Whether the sender of a push gets its reply only once the push is committed."""

    def __init__(self, schedule: Schedule, options: MasterOptions, start: Progress, now: Callable[[], float]) -> None:
        self.schedule = schedule
        self._uneven = options.uneven
        position = start.epoch if schedule.by_epoch else start.version
        self.board = TaskBoard(schedule, now, options, position, start.done)

    @abstractmethod
    def judge(self, push: Push, version: int) -> Verdict | Ticket | None:
        """What becomes of a push: refused or counted before, its ticket if it is on its way, None if it is to be taken.

        Raises:
            BadInput: it is named as in the other mode, or is no micro-batch of this job or version.
            FutureVersion: what it was computed on has not been committed here.
        """

    @abstractmethod
    def take(self, push: Push, skipped: bool) -> Ticket:
        """Counts a push that `judge` let through."""

    @abstractmethod
    def ready(self) -> list[Ticket] | None:
        """The pushes of the next version, in the order in which they are summed; None: it is not due."""

    @abstractmethod
    def forget(self, numbers: Collection[int]) -> Sequence[Ticket]:
        """The rows' part of pushes that are `ready` is lost: their micro-batches are to be computed again.

        Args:
            numbers: What names them at store servers, as in `SumTerm`.

        Returns:
            Their tickets, which count no more.
        """

    @abstractmethod
    def commit(self) -> bool:
        """Records that what was ready is committed; returns whether an epoch has ended."""

    @abstractmethod
    def resume_point(self, after_next: bool = False) -> Progress:
        """What a checkpoint keeps of the mode alone: now, or once what is ready is committed."""

    def _check_records(self, push: Push, version: int, micro_batch: int) -> None:
        task = self.schedule.task(version, micro_batch)
        read = push.records + len(push.bad_events)
        if task.spans and not 0 <= push.records <= read <= task.stop:
            raise BadInput(
                f"micro-batch {micro_batch} has {task.stop} events, but the push reports {push.records} records and "
                f"{len(push.bad_events)} events that could not be read"
            )
        if task.spans:
            return
        _refuse_bad_events(push)
        if not self._uneven and push.records != task.stop - task.start:
            raise BadInput(
                f"micro-batch {micro_batch} has {task.stop - task.start} records, but the push reports {push.records}"
            )


def _refuse_bad_events(push: Push) -> None:
    """Of a push that is of no events: nobody counts them."""
    if push.bad_events:
        raise BadInput(f"{len(push.bad_events)} events that could not be read: the job has no stream of events")


class AsyncPushes(PushProtocol):
    """A group is an epoch, which is a pass over the records; pushes are committed in the order of their arrival.

    A push of a task counts once per micro-batch, whoever computes it and however often; any other push counts once
    per sequence, and only after those with a lower one.
    """

    replies_after_commit = True

    def __init__(self, schedule: Schedule, options: MasterOptions, start: Progress, now: Callable[[], float]) -> None:
        super().__init__(schedule, options, start, now)
        self._committed = Sequences(start.sequences)
        self._queue: deque[Ticket] = deque()

    def judge(self, push: Push, version: int) -> Verdict | Ticket | None:
        name = push.id
        if not isinstance(name, AsyncPushId):
            raise BadInput("the job is asynchronous: a push is named by (incarnation, sequence), not by a version")
        same = (ticket for ticket in self._queue if ticket.id == name)
        if (ticket := next(same, None)) is not None:
            return ticket
        require_sequence(name.incarnation, name.sequence, last := self._last(name.incarnation))
        if push.computed_on is not None and push.computed_on < 0:
            raise BadInput(f"push computed on version {push.computed_on}: the first version is 0")
        of_task = name.micro_batch >= 0
        verdict = self._judge_task(push, name, version) if of_task else self._judge_sequence(push, name, last)
        if verdict is not None:
            return verdict
        if not self.board.is_open:
            return PushOutcome.STALE, "an epoch has ended: nothing is trained before the next one begins"
        return None if push.computed_on is None else self._judge_age(name, push.computed_on, version)

    def _last(self, incarnation: str) -> int:
        """The last sequence of an incarnation that was counted or is on its way."""
        waiting = (ticket.id for ticket in self._queue)
        known = (each.sequence for each in waiting if isinstance(each, AsyncPushId) and each.incarnation == incarnation)
        return max(self._committed.last(incarnation), *known, 0)

    def _judge_sequence(self, push: Push, name: AsyncPushId, last: int) -> Verdict | None:
        """Of a push that is of no task."""
        _refuse_bad_events(push)
        if name.micro_batch != NO_TASK:
            raise BadInput(f"micro-batch {name.micro_batch}: a push that is of no task says {NO_TASK}")
        if name.sequence == last:
            return PushOutcome.DUPLICATE, f"push {last} of {name.incarnation!r} was counted before"
        if name.sequence < last:
            return (
                PushOutcome.STALE,
                f"push {name.sequence} of {name.incarnation!r} comes after its push {last}: it counts no more",
            )
        if push.records < 1:
            raise BadInput(f"a push of {push.records} records: it must have at least one")
        return None

    def _judge_age(self, name: AsyncPushId, computed_on: int, version: int) -> Verdict | None:
        """Refuses a push that is too stale; its micro-batch is free again at once."""
        if computed_on > version:
            raise FutureVersion(f"push computed on version {computed_on}, which is not there; the current is {version}")
        bound = self.schedule.job.staleness_bound
        # Every push in the queue makes a version before this one would.
        behind = version + len(self._queue) - computed_on
        if bound is None or behind <= bound:
            return None
        if name.micro_batch >= 0:
            self.board.give_back(name.micro_batch, name.incarnation)
        return (
            PushOutcome.STALE,
            f"computed on version {computed_on}, it would be committed {behind} versions later; the bound is {bound}",
        )

    def _judge_task(self, push: Push, name: AsyncPushId, version: int) -> Verdict | None:
        groups, micro_batch = self.schedule.of_group, name.micro_batch
        first, stop = groups(0).start, groups(self.schedule.group_count - 1).stop
        if not first <= micro_batch < stop:
            raise BadInput(f"micro-batch {micro_batch} is not of this job, which has {first} to {stop - 1}")
        self._check_records(push, version, micro_batch)
        if self.board.was_trained(micro_batch):
            return PushOutcome.DUPLICATE, f"micro-batch {micro_batch} was counted before"
        if micro_batch >= groups(self.board.position).stop:
            raise FutureVersion(f"micro-batch {micro_batch} is of an epoch that has not begun")
        return None

    def take(self, push: Push, skipped: bool) -> Ticket:
        worker = None
        if isinstance(push.id, AsyncPushId) and push.id.micro_batch >= 0:
            _, worker = self.board.complete(TaskKind.TRAIN, push.id.micro_batch, by=push.id.incarnation)
        self._queue.append(Ticket(None if skipped else push, push.id, worker))
        return self._queue[-1]

    def ready(self) -> list[Ticket] | None:
        return [self._queue[0]] if self._queue else None

    def forget(self, numbers: Collection[int]) -> list[Ticket]:
        ticket = self._queue.popleft()  # what is ready is always one push
        if ticket.id.micro_batch >= 0:
            self.board.reopen([ticket.id.micro_batch])
        return [ticket]

    def commit(self) -> bool:
        ticket = self._queue.popleft()
        if isinstance(ticket.id, AsyncPushId):
            self._committed.remember(ticket.id)
        if self._queue or not self.board.current_done:
            return False
        self.board.advance()
        return True

    def resume_point(self, after_next: bool = False) -> Progress:
        waiting = list(self._queue)
        sequences = self._committed.as_dict()
        ends = False
        if after_next:
            first = waiting.pop(0).id
            ends = not waiting and self.board.current_done
            if isinstance(first, AsyncPushId):
                sequences[first.incarnation] = max(first.sequence, sequences.get(first.incarnation, 0))
        coming = {ticket.id.micro_batch for ticket in waiting}
        done = () if ends else tuple(number for number in self.board.done() if number not in coming)
        return Progress(epoch=self.board.position + ends, done=done, sequences=sequences)


class SyncPushes(PushProtocol):
    """A group is a version; the version says where a resumed job continues."""

    replies_after_commit = False

    def __init__(self, schedule: Schedule, options: MasterOptions, start: Progress, now: Callable[[], float]) -> None:
        super().__init__(schedule, options, start, now)
        self._tickets: dict[int, Ticket] = {}

    def judge(self, push: Push, version: int) -> Verdict | Ticket | None:
        name = push.id
        if not isinstance(name, SyncPushId):
            raise BadInput("the job is synchronous: a push is named by (version, micro-batch), not by a sequence")
        if name.version < version:
            return PushOutcome.STALE, f"version {name.version} is committed; the current version is {version}"
        if name.version > version:
            raise FutureVersion(f"push for version {name.version}, which is not there; the current one is {version}")
        if self.board.over:
            return PushOutcome.STALE, f"version {version} is the job's last; nothing is trained on it"
        if version >= self.schedule.group_count:
            raise FutureVersion(f"push for version {version}, which is not planned yet")
        numbers = self.schedule.micro_batches(version)
        if name.micro_batch not in numbers:
            raise BadInput(
                f"micro-batch {name.micro_batch} is not of version {version}, which is made of "
                f"{numbers.start} to {numbers.stop - 1}"
            )
        self._check_records(push, version, name.micro_batch)
        if name.micro_batch in self._tickets:
            return PushOutcome.DUPLICATE, f"micro-batch {name.micro_batch} was counted before"
        self._refuse_unlike(push)
        return None

    def _refuse_unlike(self, push: Push) -> None:
        """Raises `BadGradient` where the loss is divided otherwise than in the version's other micro-batches."""
        # They are all alike: any of them represents all.
        for ticket in self._tickets.values():
            if ticket.push is None:
                continue
            if _divisor_kinds(ticket.push) != _divisor_kinds(push):
                raise BadGradient(
                    f"micro-batch {push.id.micro_batch} divides its loss by {_described(push)}, and another one of its "
                    f"version by {_described(ticket.push)}: run the same model everywhere"
                )
            return

    def take(self, push: Push, skipped: bool) -> Ticket:
        _, worker = self.board.complete(TaskKind.TRAIN, push.id.micro_batch, by=push.incarnation)
        ticket = Ticket(None if skipped else push, push.id, worker, push.bad_events)
        self._tickets[push.id.micro_batch] = ticket
        return ticket

    def ready(self) -> list[Ticket] | None:
        if not (self.board.is_open and self.board.current_done):
            return None
        return list(map(self._tickets.__getitem__, sorted(self._tickets)))

    def forget(self, numbers: Collection[int]) -> list[Ticket]:
        lost = [self._tickets.pop(number) for number in numbers if number in self._tickets]
        self.board.reopen(ticket.id.micro_batch for ticket in lost)
        return lost

    def commit(self) -> bool:
        self._tickets = {}
        self.board.advance()
        return self.board.ends_epoch

    def resume_point(self, after_next: bool = False) -> Progress:
        return Progress()


def _divisor_kinds(push: Push) -> tuple[DivisorKind | None, ...]:
    return (None if push.divisor is None else push.divisor.kind, *(part.divisor.kind for part in push.parts))


def _described(push: Push) -> str:
    return ", ".join(kind or "what the job says" for kind in _divisor_kinds(push))
