"""Hands a job's micro-batches out under leases. Not thread-safe: the master's lock guards it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from elastable.embedding_store.errors import NotJoined
from elastable.master.api import Task, TaskKind
from elastable.master.tasks.leases import LeaseBook, Unit
from elastable.master.tasks.schedule import Schedule
from elastable.master.tasks.task_group import TaskGroup

__all__ = ["Reconciled", "TaskBoard"]

_AT_ONCE = 4  # evaluation tasks that a worker holds while training waits for them: an answer is a round trip


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What comes of a worker's word on what it holds.

    Attributes:
        again: Given to it before, in an answer that was lost.
        revoked: What it is to drop.
    """

    again: tuple[Task, ...]
    revoked: tuple[Task, ...]


class TaskBoard:
    """What is to be done now, what may be fetched ahead, and who does it.

    Training goes through groups one after the other: in sync mode a group is
    the micro-batches of one version, in async mode those of one epoch. The
    group in work takes pushes only once it is open (`open`); workers may fetch
    `look_ahead` groups of its epoch beyond it (sync only). Between epochs, and
    after the last one, the validation split may be evaluated; nothing of the
    next epoch is given out before that is opened. Other versions may be
    evaluated beside training: a worker gets one such task in an answer, after
    what it can do for the group in work and before anything that is ahead;
    where it can do nothing for that group, whatever it has fetched ahead; and
    a few at a time where training waits for evaluations.

    Fairness: a worker's unfinished leases in a group are at most the group's
    undone micro-batches divided by the workers there are, rounded up. So an
    idle worker always gets what is free, and a fast first asker does not get
    everything.

    A worker that waits for a version must go on asking: a free micro-batch of
    the group in work is granted to it whatever it has fetched ahead. Where none
    is free and it has none itself, it may be given one that another worker has
    been at for long, as a backup: whoever is first counts.

    Args:
        schedule: Of the job.
        now: Monotonic clock, in seconds.
        lease_seconds: How long a worker may take for a micro-batch.
        look_ahead: Groups beyond the one in work that may be fetched (sync).
        backup_after: Seconds after which a micro-batch that is held is given
            to an idle worker too; None: not before its lease ends.
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
        backup_after: float | None = None,
        place: int = 0,
        done: Iterable[int] = (),
    ) -> None:
        self._schedule = schedule
        self._sync = schedule.job.mode == "sync"
        self._total = schedule.versions_total if self._sync else schedule.job.epochs
        self._now = now
        self._look_ahead = look_ahead if self._sync else 0
        self._leases = LeaseBook(now, lease_seconds)
        self._backup_after = backup_after
        self._evaluations: dict[int, TaskGroup] = {}
        self._awaited: int | None = None
        self._groups: list[TaskGroup] = []
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

        Of the group in work, and of evaluations where a worker has nothing to
        do for that, some are granted even where `want` is 0.

        Args:
            worker: Its incarnation.
            want: How many more tasks it can hold.
            version: The current version.

        Raises:
            NotJoined: the worker has no session.
        """
        self._require_joined(worker)
        granted: list[Task] = []
        if self._awaited is not None:
            granted += self._evaluate(self._awaited, worker, max(want, _AT_ONCE - self._evaluating_now(worker)))
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
        if not any(task.version <= version for task in granted):
            granted += self._back_up(worker, version)
        return tuple(granted)

    def reconcile(self, worker: str, holding: Iterable[Task], version: int) -> Reconciled:
        """Brings together what a worker has been given and what it says that it holds.

        Of what it holds, that which is free becomes its own: it may have been
        given it by a master that was here before, or in a session before.

        Args:
            worker: Its incarnation.
            holding: All tasks that it has not finished.
            version: The current version.

        Raises:
            NotJoined: the worker has no session.
        """
        self._require_joined(worker)
        revoked, held = [], set()
        for task in holding:
            group = self._group_of(task.kind, task.micro_batch, task.version)
            unit = None if group is None else group.unit(task.micro_batch)
            if group is None or unit is None or task.micro_batch in group.done:
                revoked.append(task)
                continue
            held.add(unit)
            if self._leases.is_live(worker, unit, group.opened):
                continue
            if not self._leases.is_free(unit, group.opened):
                revoked.append(task)
            elif not self._leases.holds(worker, unit):  # else it has had its time, and may keep it until somebody asks
                self._leases.grant(unit, worker)
        return Reconciled(tuple(self._lost(worker, held, version)), tuple(revoked))

    def give_back(self, micro_batch: int, worker: str) -> None:
        """A training micro-batch that the worker holds is free at once, unless another one holds it too."""
        self._leases.give_back((TaskKind.TRAIN, 0, micro_batch), worker)

    def complete(self, kind: TaskKind, micro_batch: int, version: int = 0, by: str = "") -> tuple[bool, str | None]:
        """Counts a micro-batch of the group in work, or of the evaluation of `version`, as done.

        Args:
            kind: What was done.
            micro_batch: Its number.
            version: That was evaluated.
            by: The worker that did it; "": the one to whom it was given last.

        Returns:
            Whether it counts (False: it was done before, or is not of that
            group), and the worker that did it, if known.
        """
        evaluates = kind is TaskKind.EVALUATE
        group = self._evaluations.get(version) if evaluates else next(iter(self._groups), None)
        if group is None or micro_batch not in group.numbers or micro_batch in group.done:
            return False, None
        group.done.add(micro_batch)
        return True, self._leases.finish(group.unit(micro_batch), by)

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
        self._evaluations[version] = TaskGroup(TaskKind.EVALUATE, numbers, version, opened=self._now())
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
        """Tasks of the oldest evaluation that has some for the worker."""
        most = min(want, 1)
        if not self.is_open:
            most = max(most, _AT_ONCE - self._evaluating_now(worker))
        elif not self._has_work(worker):
            most = max(most, 1)
        for version in self.evaluations:
            if version != self._awaited and (tasks := self._evaluate(version, worker, most)):
                return tasks
        return []

    def _evaluating_now(self, worker: str) -> int:
        """How many evaluation tasks the worker holds."""
        return sum(kind is TaskKind.EVALUATE for kind, _, _ in self._leases.units(worker))

    def _has_work(self, worker: str) -> bool:
        """Whether the worker holds anything that it can do while training is open."""
        return self._evaluating_now(worker) > 0 or any(map(self._groups[0].holds, self._leases.units(worker)))

    def _evaluate(self, version: int, worker: str, want: int) -> list[Task]:
        numbers = self._grant(self._evaluations[version], worker, want)
        return [self._schedule.evaluation(version, number) for number in numbers]

    def _require_joined(self, worker: str) -> None:
        if not self._leases.is_there(worker):
            raise NotJoined(f"worker {worker!r} has not joined the job: open a session first")

    def _group_of(self, kind: TaskKind, micro_batch: int, version: int) -> TaskGroup | None:
        """The group of a task that a worker may hold now."""
        if kind is TaskKind.EVALUATE:
            groups = [group for at, group in self._evaluations.items() if at == version]
        else:
            groups = [] if self._between_epochs else self._groups
        return next((group for group in groups if micro_batch in group.numbers), None)

    def _lost(self, worker: str, held: Collection[Unit], version: int) -> Iterator[Task]:
        """Tasks that were given to a worker that does not hold them: the answer was lost."""
        for unit in sorted(set(self._leases.units(worker)) - set(held)):
            kind, at, number = unit
            group = self._group_of(kind, number, at)
            if group is None or not self._leases.is_live(worker, unit, group.opened):
                continue
            self._leases.grant(unit, worker)
            if kind is TaskKind.EVALUATE:
                yield self._schedule.evaluation(at, number)
            else:
                yield self._schedule.task(version + (self._groups.index(group) if self._sync else 0), number)

    def _back_up(self, worker: str, version: int) -> list[Task]:
        """The micro-batch of the group in work that has been held for longest, for a worker that has nothing to do."""
        awaited = None if self._awaited is None else self._evaluations[self._awaited]
        group = self._groups[0] if self.is_open else awaited
        if self._backup_after is None or group is None or group.opened is None:
            return []
        if any(group.holds(unit) for unit in self._leases.units(worker)):
            return []
        # All of them are held, as nothing was granted: so they are few.
        since = {number: self._leases.held_since(group.unit(number), group.opened) for number in group.undone()}
        longest = min(since, key=lambda number: since[number], default=None)
        if longest is None or self._now() - since[longest] <= self._backup_after:
            return []
        self._leases.grant(group.unit(longest), worker)
        if group.kind is TaskKind.EVALUATE:
            return [self._schedule.evaluation(group.version, longest)]
        return [self._schedule.task(version, longest)]

    @property
    def _between_epochs(self) -> bool:
        return bool(self._groups) and self._groups[0].opened is None and self.ends_epoch

    def _grant(self, group: TaskGroup, worker: str, want: int) -> list[int]:
        if want < 1 or not group.undone_count:
            return []
        fair = -(-group.undone_count // max(1, len(self._leases.workers)))
        held = sum(
            group.holds(unit) and self._leases.is_live(worker, unit, group.opened)
            for unit in self._leases.units(worker)
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
        end = self._schedule.first_version(epoch + 1) if self._sync else epoch + 1
        for place in range(self.place + len(self._groups), min(self.place + self._look_ahead + 1, end, self._total)):
            of = self._schedule.micro_batches if self._sync else self._schedule.micro_batches_of_epoch
            self._groups.append(TaskGroup(TaskKind.TRAIN, of(place)))
