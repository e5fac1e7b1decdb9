"""Leases a job's micro-batches to workers. Not thread-safe: the master's lock guards it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from elastable.embedding_store.errors import NotJoined
from elastable.master.api import Lease, Task, TaskKind
from elastable.master.master_options import MasterOptions
from elastable.master.tasks.leases import LeaseBook, Offers
from elastable.master.tasks.task_group import EvaluationGroups, TaskGroup, TaskGrouping, TrainingGroups, Unit

__all__ = ["TaskBoard"]

_AT_ONCE = 4  # evaluation tasks that a worker holds while training waits for them: an answer is a round trip


class TaskBoard:
    """Decides which tasks a worker gets: of the current group, fetched ahead, or of an evaluation.

    Groups are trained one after the other; `grouping` says what they are. The
    current group takes pushes only once it is open (`open`); workers may fetch
    up to `MasterOptions.look_ahead` further groups of its epoch. Between epochs, and
    after the last one, the validation split may be evaluated; nothing of the
    next epoch is leased before that is opened. Other versions may be
    evaluated while training continues: a worker gets one such task per answer, after
    its tasks of the current group and before anything fetched ahead;
    where it can do nothing for that group, whatever it has fetched ahead; and
    a few at a time where training waits for evaluations.

    A worker's unfinished leases are limited to its fair share (`LeaseBook.grant_share`).

    A worker that waits for a version must keep asking: a free micro-batch of
    the current group is granted to it whatever it has fetched ahead. Where none
    is free and it has none itself, it may get a backup of one that another worker
    has been computing for long: the first result counts.

    Attributes:
        training: The groups that are trained.
        evaluations: The versions that are being evaluated.

    Args:
        grouping: How the job's training is divided.
        now: Monotonic clock, in seconds.
        options: Lease times, look-ahead and backups.
        position: The number of the group that is trained next.
        done: Micro-batches of that group that are done.
    """

    def __init__(
        self,
        grouping: TaskGrouping,
        now: Callable[[], float],
        options: MasterOptions,
        position: int = 0,
        done: Iterable[int] = (),
    ) -> None:
        self._grouping = grouping
        self._schedule = grouping.schedule
        self._now = now
        self._leases = LeaseBook(now, options.lease_seconds)
        self._offers = Offers(self._leases, now, options.backup_after_s)
        self.evaluations = EvaluationGroups()
        self.training = TrainingGroups(grouping, options.look_ahead, position, done)

    @property
    def is_open(self) -> bool:
        """Whether training may go on now."""
        return self.evaluations.awaited is None and self.training.opened

    def join(self, worker: str) -> None:
        """Adds a worker; joining twice is harmless."""
        self._leases.join(worker)

    def release(self, worker: str) -> None:
        """Removes a worker and frees everything it holds."""
        for unit in self._leases.leave(worker):
            self._return(unit)

    def held_by(self, worker: str) -> int:
        """Unfinished micro-batches that the worker holds."""
        return len(self._leases.units(worker))

    def lease(self, worker: str, want: int, version: int) -> tuple[Task, ...]:
        """Up to `want` tasks for the worker, the most urgent first.

        Some tasks of the current group, and of evaluations where a worker has nothing to
        do for that, are granted even where `want` is 0.

        Args:
            worker: Its incarnation.
            want: How many more tasks it can hold.
            version: The current version.

        Raises:
            NotJoined: the worker has no session.
        """
        self._require_joined(worker)
        granted: list[Task] = []
        if (awaited := self.evaluations.awaited_group) is not None:
            granted += self._evaluate(awaited, worker, max(want, _AT_ONCE - self._evaluating_now(worker)))
        groups = self.training.leasable()
        for ahead, group in enumerate(groups):
            current = ahead == 0 and self.is_open
            if current or self._grouping.leases_ahead:
                numbers = self._leases.grant_share(group, worker, max(want - len(granted), 1 if current else 0))
                granted += [self._schedule.task(version + ahead, number) for number in numbers]
            if ahead == 0:
                granted += self._evaluate_concurrently(worker, want - len(granted))
        if not groups:
            granted += self._evaluate_concurrently(worker, want - len(granted))
        if not any(task.version <= version for task in granted):
            granted += self._back_up(worker, version)
        return tuple(granted)

    def offers(self) -> bool:
        """Whether a worker that asks now may get something; False: none does, however it asks."""
        return self._offers.any(self._leasable(), self._urgent)

    def next_due(self) -> float:
        """A time before which nothing can be offered unless something else happens."""
        return self._offers.next_due(self._leasable(), self._urgent)

    @property
    def _urgent(self) -> TaskGroup | None:
        """The group that the next version, or training, waits for."""
        return self.training.current if self.is_open else self.evaluations.awaited_group

    def _leasable(self) -> Iterator[TaskGroup]:
        """Groups that tasks are leased of now."""
        if (awaited := self.evaluations.awaited_group) is not None:
            yield awaited
        for ahead, group in enumerate(self.training.leasable()):
            if self._grouping.leases_ahead or (ahead == 0 and self.is_open):
                yield group
        yield from self.evaluations.concurrent

    def _return(self, unit: Unit) -> None:
        """The unit may be free again."""
        kind, version, number = unit
        if (group := self._group_of(kind, number, version)) is not None:
            group.return_(number)

    def reconcile(self, worker: str, holding: Iterable[Task], version: int) -> Lease:
        """Reconciles the worker's leases with the tasks that it reports to hold.

        Unleased tasks that it holds are granted to it: an earlier master may have leased
        them to it, or this one in an earlier session.

        Args:
            worker: Its incarnation.
            holding: All tasks that it has not finished.
            version: The current version.

        Returns:
            As `tasks` those that were leased to it in an answer that was lost; as `revoked` those it must drop.

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
            elif not self._leases.holds(worker, unit):  # else it ended: kept until another asks
                self._leases.grant(unit, worker)
        return Lease(tuple(self._lost(worker, held, version)), revoked=tuple(revoked))

    def give_back(self, micro_batch: int, worker: str) -> None:
        """Frees a training micro-batch that the worker holds, unless another one holds it too."""
        self._leases.give_back((TaskKind.TRAIN, 0, micro_batch), worker)
        self._return((TaskKind.TRAIN, 0, micro_batch))

    def complete(self, kind: TaskKind, micro_batch: int, version: int = 0, by: str = "") -> tuple[bool, str | None]:
        """Counts a micro-batch of the current group, or of the evaluation of `version`, as done.

        Args:
            kind: Train or evaluate.
            micro_batch: Its number.
            version: The version that was evaluated.
            by: The worker that did it; "": the one it was granted to last.

        Returns:
            Whether it counts (False: it was done before, or is not of that
            group), and the worker that did it, if known.
        """
        evaluates = kind is TaskKind.EVALUATE
        group = self.evaluations.get(version) if evaluates else self.training.current
        if group is None or micro_batch not in group.numbers or micro_batch in group.done:
            return False, None
        group.done.add(micro_batch)
        return True, self._leases.finish(group.unit(micro_batch), by)

    def open(self) -> None:
        """Opens the current group."""
        self.training.open(self._now())

    def begin_evaluation(self, version: int, concurrent: bool = False) -> None:
        """Opens the validation split on `version`; training waits for it unless `concurrent` is set."""
        self.evaluations.begin(version, self._schedule.evaluation_tasks, self._now(), awaited=not concurrent)

    def end_evaluation(self, version: int) -> None:
        """Ends the evaluation of that version, complete or not."""
        group = self.evaluations.end(version)
        for number in group.undone():
            self._leases.finish(group.unit(number))

    def _evaluate_concurrently(self, worker: str, want: int) -> list[Task]:
        """Tasks of the oldest concurrent evaluation that has some for the worker."""
        most = min(want, 1)
        if not self.is_open:
            most = max(most, _AT_ONCE - self._evaluating_now(worker))
        elif not self._has_work(worker):
            most = max(most, 1)
        offers = (self._evaluate(group, worker, most) for group in self.evaluations.concurrent)
        return next(filter(None, offers), [])

    def _evaluating_now(self, worker: str) -> int:
        """How many evaluation tasks the worker holds."""
        return sum(kind is TaskKind.EVALUATE for kind, _, _ in self._leases.units(worker))

    def _has_work(self, worker: str) -> bool:
        """Whether the worker holds anything that it can do while training is open."""
        current = self.training.current
        holds_training = current is not None and any(map(current.holds, self._leases.units(worker)))
        return holds_training or self._evaluating_now(worker) > 0

    def _evaluate(self, group: TaskGroup, worker: str, want: int) -> list[Task]:
        numbers = self._leases.grant_share(group, worker, want)
        return [self._schedule.evaluation(group.version, number) for number in numbers]

    def _require_joined(self, worker: str) -> None:
        if not self._leases.has_joined(worker):
            raise NotJoined(f"worker {worker!r} has not joined the job: open a session first")

    def _group_of(self, kind: TaskKind, micro_batch: int, version: int) -> TaskGroup | None:
        """The group of a task that a worker may hold now."""
        groups: Iterable[TaskGroup | None]
        groups = (self.evaluations.get(version),) if kind is TaskKind.EVALUATE else self.training.leasable()
        return next((group for group in groups if group is not None and micro_batch in group.numbers), None)

    def _lost(self, worker: str, held: Collection[Unit], version: int) -> Iterator[Task]:
        """Tasks that are leased to a worker that does not hold them: the answer was lost."""
        for unit in sorted(set(self._leases.units(worker)) - set(held)):
            kind, at, number = unit
            group = self._group_of(kind, number, at)
            if group is None or not self._leases.is_live(worker, unit, group.opened):
                continue
            self._leases.grant(unit, worker)
            yield self._task(group, number, version)

    def _task(self, group: TaskGroup, number: int, version: int) -> Task:
        if group.kind is TaskKind.EVALUATE:
            return self._schedule.evaluation(group.version, number)
        return self._schedule.task(version + self.training.leasable().index(group), number)

    def _back_up(self, worker: str, version: int) -> list[Task]:
        """The micro-batch of the current group that has been in progress for longest, for a worker without work."""
        group = self._urgent
        number = self._offers.back_up(group, worker)
        return [] if group is None or number is None else [self._task(group, number, version)]
