"""Hands a job's micro-batches out under leases. Not thread-safe: the master's lock guards it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from embedding_store.errors import NotJoined
from master.api import Task, TaskKind
from master.leases import LeaseBook, Unit
from master.schedule import Schedule

__all__ = ["TaskBoard"]


@dataclass
class _Group:
    """Micro-batches that must all be done before the job goes on.

    Attributes:
        kind: What is done with them.
        numbers: Their numbers (see `Task.micro_batch`).
        version: That is evaluated; 0 of training.
        opened: When they could first be worked on; None: not yet.
        done: Those that are done.
    """

    kind: TaskKind
    numbers: range
    version: int = 0
    opened: float | None = None
    done: set[int] = field(default_factory=set)
    _lowest: int = 0

    def __post_init__(self) -> None:
        self._lowest = self.numbers.start

    @property
    def undone_count(self) -> int:
        return len(self.numbers) - len(self.done)

    def unit(self, number: int) -> Unit:
        return self.kind, self.version, number

    def undone(self) -> Iterator[int]:
        # Nothing below `_lowest` is undone: an epoch of a million tasks is not searched anew at every lease.
        while self._lowest in self.done:
            self._lowest += 1
        return (number for number in range(self._lowest, self.numbers.stop) if number not in self.done)


class TaskBoard:
    """What is to be done now, what may be fetched ahead, and who does it.

    Training goes through groups one after the other: in sync mode a group is
    the micro-batches of one version, in async mode those of one epoch. The
    group in work takes pushes only once it is open (`open`); workers may fetch
    `look_ahead` groups of its epoch beyond it (sync only). Between epochs, and
    after the last one, the validation split may be evaluated; nothing of the
    next epoch is given out before that is opened. Other versions may be
    evaluated beside training: a worker gets one such task in an answer, after
    what it can do for the group in work and before anything that is ahead.

    Fairness: a worker's unfinished leases in a group are at most the group's
    undone micro-batches divided by the workers there are, rounded up. So an
    idle worker always gets what is free, and a fast first asker does not get
    everything.

    A worker that waits for a version must go on asking: a free micro-batch of
    the group in work is granted to it whatever it has fetched ahead.

    Args:
        schedule: Of the job.
        now: Monotonic clock, in seconds.
        lease_seconds: How long a worker may take for a micro-batch.
        look_ahead: Groups beyond the one in work that may be fetched (sync).
        place: The group in work: the version (sync) or epoch (async) that a
            resumed job trains next.
        done: Micro-batches of that group that are done (async).
    """

    def __init__(
        self,
        schedule: Schedule,
        now: Callable[[], float],
        *,
        lease_seconds: float = 60.0,
        look_ahead: int = 3,
        place: int = 0,
        done: Iterable[int] = (),
    ) -> None:
        self._schedule = schedule
        self._sync = schedule.job.mode == "sync"
        self._total = schedule.versions_total if self._sync else schedule.job.epochs
        self._now = now
        self._look_ahead = look_ahead if self._sync else 0
        self._leases = LeaseBook(now, lease_seconds)
        self._evaluations: dict[int, _Group] = {}
        self._awaited: int | None = None
        self._groups: list[_Group] = []
        self.place = place
        self._top_up()
        if self._groups:
            self._groups[0].done.update(done)

    @property
    def workers(self) -> tuple[str, ...]:
        """Workers that are there."""
        return self._leases.workers

    @property
    def evaluating(self) -> bool:
        """Whether the validation split is what is done now, and nothing beside it."""
        return self._awaited is not None

    @property
    def evaluations(self) -> tuple[int, ...]:
        """Versions that are being evaluated, oldest first."""
        return tuple(sorted(self._evaluations))

    @property
    def trained(self) -> bool:
        """Whether every micro-batch of the job has been trained."""
        return not self._groups

    @property
    def ends_epoch(self) -> bool:
        """Whether an epoch has just ended and nothing of the next one is done."""
        if self.place == 0 or (self._groups and self._groups[0].done):
            return False
        return self._schedule.ends_epoch(self.place) if self._sync else True

    @property
    def is_open(self) -> bool:
        """Whether training may go on now."""
        return self._awaited is None and bool(self._groups) and self._groups[0].opened is not None

    @property
    def training_done(self) -> bool:
        """Whether the training group in work has nothing undone left."""
        return bool(self._groups) and self._groups[0].undone_count == 0

    @property
    def evaluated(self) -> int | None:
        """The oldest version whose evaluation has nothing undone left, if there is one; the awaited one first."""
        done = [version for version, group in self._evaluations.items() if not group.undone_count]
        return min(done, key=lambda version: (version != self._awaited, version), default=None)

    def done(self) -> tuple[int, ...]:
        """Micro-batches of the training group in work that are done, in order."""
        return tuple(sorted(self._groups[0].done)) if self._groups else ()

    def join(self, worker: str) -> None:
        """A worker is there; joining twice is harmless."""
        self._leases.join(worker)

    def release(self, worker: str) -> None:
        """A worker is gone: everything it holds is free again at once."""
        self._leases.leave(worker)

    def held_by(self, worker: str) -> int:
        """Unfinished micro-batches that the worker holds."""
        return len(self._leases.units(worker))

    def lease(self, worker: str, want: int, version: int) -> tuple[Task, ...]:
        """Up to `want` tasks for the worker, those to be done first in front.

        Of the group in work one task is granted even where `want` is 0.

        Args:
            worker: Its incarnation.
            want: How many more tasks it can hold.
            version: The current version.

        Raises:
            NotJoined: the worker has no session.
        """
        if worker not in self._leases.workers:
            raise NotJoined(f"worker {worker!r} has not joined the job: open a session first")
        granted: list[Task] = []
        if self._awaited is not None:
            granted += self._evaluate(self._awaited, worker, max(want, 1))
        groups = () if self._between_epochs else tuple(self._groups)
        for ahead, group in enumerate(groups):
            in_work = ahead == 0 and self.is_open
            if in_work or self._sync:
                numbers = self._grant(group, worker, max(want - len(granted), 1 if in_work else 0))
                granted += [self._schedule.task(version + ahead, number) for number in numbers]
            if ahead == 0:
                granted += self._evaluate_beside(worker, want - len(granted))
        if not groups:
            granted += self._evaluate_beside(worker, want - len(granted))
        return tuple(granted)

    def complete(self, kind: TaskKind, micro_batch: int, version: int = 0) -> tuple[bool, str | None]:
        """Counts a micro-batch of the group in work, or of the evaluation of `version`, as done.

        Returns:
            Whether it counts (False: it was done before, or is not of that
            group), and the worker to whom it had been given last.
        """
        evaluates = kind is TaskKind.EVALUATE
        group = self._evaluations.get(version) if evaluates else next(iter(self._groups), None)
        if group is None or micro_batch not in group.numbers or micro_batch in group.done:
            return False, None
        group.done.add(micro_batch)
        return True, self._leases.finish(group.unit(micro_batch))

    def was_trained(self, micro_batch: int) -> bool:
        """Whether a training micro-batch is done."""
        head = next(iter(self._groups), None)
        return head is None or micro_batch < head.numbers.start or micro_batch in head.done

    def advance(self) -> None:
        """Leaves the training group in work, which is done, behind; the next one is not open yet."""
        self._groups.pop(0)
        self.place += 1
        self._top_up()

    def open(self) -> None:
        """Opens the training group in work."""
        if self._groups and self._groups[0].opened is None:
            self._groups[0].opened = self._now()

    def begin_evaluation(self, version: int, beside: bool = False) -> None:
        """Opens the validation split on `version`; unless it is `beside` training, it comes before any."""
        numbers = range(self._schedule.evaluation_tasks)
        self._evaluations[version] = _Group(TaskKind.EVALUATE, numbers, version, opened=self._now())
        if not beside:
            self._awaited = version

    def end_evaluation(self, version: int) -> None:
        """The evaluation of that version is over, done or given up."""
        group = self._evaluations.pop(version)
        for number in group.undone():
            self._leases.finish(group.unit(number))
        if self._awaited == version:
            self._awaited = None

    def _evaluate_beside(self, worker: str, want: int) -> list[Task]:
        """One task of the oldest evaluation that has one for the worker."""
        for version in self.evaluations:
            if version != self._awaited and (tasks := self._evaluate(version, worker, min(want, 1))):
                return tasks
        return []

    def _evaluate(self, version: int, worker: str, want: int) -> list[Task]:
        numbers = self._grant(self._evaluations[version], worker, want)
        return [self._schedule.evaluation(version, number) for number in numbers]

    @property
    def _between_epochs(self) -> bool:
        return bool(self._groups) and self._groups[0].opened is None and self.ends_epoch

    def _grant(self, group: _Group, worker: str, want: int) -> list[int]:
        if want < 1 or not group.undone_count:
            return []
        fair = -(-group.undone_count // max(1, len(self._leases.workers)))
        held = sum(
            (kind, version) == (group.kind, group.version)
            and number in group.numbers
            and self._leases.is_live(worker, group.unit(number), group.opened)
            for kind, version, number in self._leases.units(worker)
        )
        room = min(want, fair - held)
        granted: list[int] = []
        for number in group.undone():
            if len(granted) >= room:
                break
            if self._leases.is_free(group.unit(number), group.opened):
                self._leases.grant(group.unit(number), worker)
                granted.append(number)
        return granted

    def _top_up(self) -> None:
        epoch = self._schedule.epoch(self.place) if self._sync else self.place
        end = (epoch + 1) * self._schedule.versions_per_epoch if self._sync else epoch + 1
        for place in range(self.place + len(self._groups), min(self.place + self._look_ahead + 1, end, self._total)):
            of = self._schedule.micro_batches if self._sync else self._schedule.micro_batches_of_epoch
            self._groups.append(_Group(TaskKind.TRAIN, of(place)))
