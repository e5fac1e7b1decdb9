"""What the modes of a job decide differently: leases, names of pushes, when a version is due, what is resumed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from elastable.embedding_store.errors import BadInput
from elastable.master.api import AsyncPushId, Push, PushId, PushOutcome
from elastable.master.master_options import MasterOptions
from elastable.master.tasks.progress import Progress
from elastable.master.tasks.schedule import Schedule
from elastable.master.tasks.task_board import TaskBoard

__all__ = ["PushProtocol", "ResumePoint", "Sequences", "Ticket", "Verdict"]

# Incarnations remembered: more than a job ever has, and still a bound.
_INCARNATIONS = 65_536

Verdict = tuple[PushOutcome, str]


@dataclass(slots=True)
class Ticket:
    """A push that counts, on its way into a version.

    Attributes:
        push: The push; None: it was skipped, its micro-batch is done.
        id: Its name.
        worker: The worker that the micro-batch was leased to, if any.
        committed: Whether the version that contains it is committed.
        why_not: Why it is not, where its sender is told so.
    """

    push: Push | None
    id: PushId
    worker: str | None = None
    committed: bool = False
    why_not: str = "the job ended before the push was committed"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """What a resumed job needs besides the version; see `elastable.master.tasks.progress.Progress`."""

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

    A job chooses one of the implementations when it starts; nothing else on the master asks for the mode. Each is also
    the `TaskGrouping` of its board. Not thread-safe: the master's lock guards it.

    Attributes:
        board: Leases the job's micro-batches.

    Args:
        schedule: Of the job.
        options: Of the board, and whether micro-batches are `uneven`.
        start: Where the job begins or resumes.
        now: Monotonic clock, in seconds.
    """

    replies_after_commit: bool
    """Whether the sender of a push gets its reply only once the push is committed."""

    leases_ahead: bool
    """Whether workers may fetch the micro-batches of a group before it is open."""

    def __init__(self, schedule: Schedule, options: MasterOptions, start: Progress, now: Callable[[], float]) -> None:
        self.schedule = schedule
        self._uneven = options.uneven
        self.board = TaskBoard(self, now, options, self.first_group(start), start.done)

    @property
    @abstractmethod
    def group_count(self) -> int:
        """How many groups the job has."""

    @abstractmethod
    def first_group(self, start: Progress) -> int:
        """The group at which a job resumes."""

    @abstractmethod
    def micro_batches(self, group: int) -> range:
        """The numbers within the job of the group's micro-batches."""

    @abstractmethod
    def epoch(self, group: int) -> int:
        """The epoch that a group belongs to, counted from 0."""

    @abstractmethod
    def epoch_stop(self, group: int) -> int:
        """The first group behind the epoch that `group` belongs to."""

    @abstractmethod
    def starts_epoch(self, group: int) -> bool:
        """Whether the group, which is not the first one, begins an epoch."""

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
    def resume_point(self, after_next: bool = False) -> ResumePoint:
        """What a checkpoint keeps: now, or once what is ready is committed."""

    def _check_records(self, push: Push, version: int, micro_batch: int) -> None:
        task = self.schedule.task(version, micro_batch)
        if not self._uneven and push.records != task.stop - task.start:
            raise BadInput(
                f"micro-batch {micro_batch} has {task.stop - task.start} records, but the push reports {push.records}"
            )
