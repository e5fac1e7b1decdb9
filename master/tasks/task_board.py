"""Which worker gets which micro-batch, who holds it and until when. Not thread-safe: the master's lock guards it."""

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from elastable.embedding_store.errors import NotJoined
from elastable.master.api import Lease, Task, TaskKind
from elastable.master.master_options import MasterOptions
from elastable.master.tasks.schedule import Schedule

Unit = tuple[TaskKind, int, int]
"""The kind of a task; the version that is evaluated, 0 of training; the micro-batch."""


@dataclass
class TaskGroup:
    """Micro-batches that must all be done before the job continues.

    Attributes:
        numbers: The micro-batches (`Task.micro_batch`).
        version: The version that is evaluated; 0 of training.
        opened: When work on the group could start; None: not yet.
        done: The micro-batches that are done.
        look_at: Before that time no lease of its micro-batches ends.
    """

    kind: TaskKind
    numbers: range
    version: int = 0
    opened: float | None = None
    done: set[int] = field(default_factory=set)
    look_at: float = 0.0
    _lowest: int = 0
    _fresh: int = 0
    _returned: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lowest = self._fresh = self.numbers.start

    @property
    def undone_count(self) -> int:
        """How many are not done."""
        return len(self.numbers) - len(self.done)

    def unit(self, number: int) -> Unit:
        """The key of a micro-batch in the `LeaseBook`."""
        return self.kind, self.version, number

    def holds(self, unit: Unit) -> bool:
        """Whether the key is one of this group's."""
        return unit[:2] == (self.kind, self.version) and unit[2] in self.numbers

    def undone(self) -> Iterator[int]:
        """The micro-batches that are not done, in order."""
        # Nothing below `_lowest` is undone: an epoch of a million tasks is not searched from its start at every lease.
        while self._lowest in self.done:
            self._lowest += 1
        return (number for number in range(self._lowest, self.numbers.stop) if number not in self.done)

    def lowest_free(self, is_free: Callable[[int], bool]) -> int | None:
        """The lowest micro-batch that is not done and that `is_free` says nobody holds.

        Those from `_fresh` on, and those in `_returned`, are all that can be free: a thousand that are held are not
        searched at every lease.
        """
        while self._returned:
            if self._returned[0] not in self.done and is_free(self._returned[0]):
                return self._returned[0]
            heapq.heappop(self._returned)
        while self._fresh < self.numbers.stop:
            if self._fresh not in self.done and is_free(self._fresh):
                return self._fresh
            self._fresh += 1
        return None

    def reopen(self, number: int) -> None:
        """What was done of the micro-batch is lost: it is to be done again."""
        self.done.discard(number)
        self._lowest = min(self._lowest, number)
        self.return_(number)

    def return_(self, number: int) -> None:
        """Notes that a holder of the micro-batch gave it up, or that its lease has ended."""
        if number < self._fresh:
            heapq.heappush(self._returned, number)


class TrainingGroups:
    """The current group, and those of its epoch that workers may fetch ahead.

    Attributes:
        position: The number of the current group.

    Args:
        look_ahead: How many groups behind the current one workers may fetch.
        position, done: The group that is trained next, and its micro-batches that are done.
    """

    def __init__(self, schedule: Schedule, look_ahead: int, position: int, done: Iterable[int]) -> None:
        self._schedule = schedule
        self._look_ahead = 0 if schedule.by_epoch else look_ahead
        self._groups: list[TaskGroup] = []
        self.position = position
        self._top_up()
        if self._groups:
            self._groups[0].done.update(done)

    @property
    def current(self) -> TaskGroup | None:
        """The group in training; None: every micro-batch of the job has been trained."""
        return self._groups[0] if self._groups else None

    @property
    def over(self) -> bool:
        """Whether every micro-batch of the job has been trained."""
        return not self._groups

    @property
    def opened(self) -> bool:
        """Whether the current group is open."""
        return bool(self._groups) and self._groups[0].opened is not None

    @property
    def current_done(self) -> bool:
        """Whether all micro-batches of the current group are done."""
        return bool(self._groups) and self._groups[0].undone_count == 0

    @property
    def ends_epoch(self) -> bool:
        """Whether an epoch has just ended and nothing of the next one is done."""
        if self.position == 0 or (self._groups and self._groups[0].done):
            return False
        return self._schedule.starts_epoch(self.position)

    def leasable(self) -> tuple[TaskGroup, ...]:
        """The current group and those behind it; none between two epochs, before the next one is opened."""
        return () if self.ends_epoch and not self.opened else tuple(self._groups)

    def done(self) -> tuple[int, ...]:
        """Micro-batches of the current group that are done, in order."""
        return tuple(sorted(self._groups[0].done)) if self._groups else ()

    def was_trained(self, micro_batch: int) -> bool:
        """Whether a micro-batch is done."""
        head = self.current
        return head is None or micro_batch < head.numbers.start or micro_batch in head.done

    def reopen(self, micro_batches: Iterable[int]) -> None:
        """Marks micro-batches of the current group as not done."""
        for number in micro_batches:
            self._groups[0].reopen(number)

    def advance(self) -> None:
        """Goes on from the current group, which is done, to the next one, which is not open yet."""
        self._groups.pop(0)
        self.position += 1
        self._top_up()

    def open(self, now: float) -> None:
        """Opens the current group, unless it is open."""
        if self._groups and self._groups[0].opened is None:
            self._groups[0].opened = now

    def _top_up(self) -> None:
        epoch_stop, stop = self._schedule.epoch_stop(self.position), self.position + self._look_ahead + 1
        for group in range(self.position + len(self._groups), min(stop, epoch_stop, self._schedule.group_count)):
            self._groups.append(TaskGroup(TaskKind.TRAIN, self._schedule.of_group(group)))


class EvaluationGroups:
    """One `TaskGroup` for each version under evaluation.

    Attributes:
        awaited: The version that training waits for; None: none, all evaluations run concurrently with training.
    """

    def __init__(self) -> None:
        self._groups: dict[int, TaskGroup] = {}
        self.awaited: int | None = None

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions, oldest first."""
        return tuple(sorted(self._groups))

    @property
    def concurrent(self) -> list[TaskGroup]:
        """The groups that training does not wait for, oldest version first."""
        return [self._groups[version] for version in self.versions if version != self.awaited]

    @property
    def awaited_group(self) -> TaskGroup | None:
        """The group that training waits for."""
        return None if self.awaited is None else self._groups[self.awaited]

    @property
    def complete(self) -> int | None:
        """The oldest version whose evaluation is complete, if any; the awaited one first."""
        done = [version for version, group in self._groups.items() if not group.undone_count]
        return min(done, key=lambda version: (version != self.awaited, version), default=None)

    def get(self, version: int) -> TaskGroup | None:
        """The group of a version, if it is being evaluated."""
        return self._groups.get(version)

    def begin(self, version: int, tasks: int, opened: float, awaited: bool) -> None:
        """Opens the `tasks` micro-batches of the validation split on `version`."""
        self._groups[version] = TaskGroup(TaskKind.EVALUATE, range(tasks), version, opened)
        if awaited:
            self.awaited = version

    def end(self, version: int) -> TaskGroup:
        """Removes the group of a version, complete or not."""
        if self.awaited == version:
            self.awaited = None
        return self._groups.pop(version)


_AT_ONCE = 4  # evaluation tasks that a worker holds while training waits for them: an answer is a round trip


class LeaseBook:
    """The leases of all workers that have joined.

    A lease ends `lease_seconds` after the latest of: its grant, the opening of its group (a micro-batch fetched ahead
    cannot be worked on before), and the last micro-batch its worker finished (its others wait in the worker's queue).
    Then the micro-batch may be given to another worker, while the first one may still answer.

    Args:
        now: Monotonic clock, in seconds.
        lease_seconds: How long a worker may take for a micro-batch.
    """

    def __init__(self, now: Callable[[], float], lease_seconds: float) -> None:
        self._now = now
        self.lease_seconds = lease_seconds
        self._granted: dict[Unit, dict[str, float]] = {}
        self._held: dict[str, set[Unit]] = {}
        self._progress: dict[str, float] = {}

    def has_joined(self, worker: str) -> bool:
        """Whether the worker takes part now."""
        return worker in self._held

    def join(self, worker: str) -> None:
        """Adds a worker; joining twice is harmless."""
        self._held.setdefault(worker, set())
        self._progress.setdefault(worker, self._now())

    def leave(self, worker: str) -> tuple[Unit, ...]:
        """Removes a worker and frees everything it holds; returns that."""
        units = tuple(self._held.pop(worker, ()))
        for unit in units:
            self._drop_holder(unit, worker)
        self._progress.pop(worker, None)
        return units

    def grant(self, unit: Unit, worker: str) -> None:
        """Gives the unit to the worker; earlier holders may still answer."""
        holders = self._granted.setdefault(unit, {})
        holders.pop(worker, None)  # dicts keep the position of a key: the latest grant must be last
        holders[worker] = self._now()
        self._held[worker].add(unit)

    def grant_share(self, group: TaskGroup, worker: str, want: int) -> list[int]:
        """Grants up to `want` free micro-batches of the group, and no more than the worker's fair share.

        The share is the group's undone micro-batches divided by the workers, rounded up: an idle worker always gets
        what is free, and the first worker to ask does not get everything.
        """
        if want < 1 or not group.undone_count:
            return []
        fair = -(-group.undone_count // max(1, len(self._held)))
        held = sum(group.holds(unit) and self.is_live(worker, unit, group.opened) for unit in self.units(worker))
        room = min(want, fair - held)
        granted: list[int] = []
        while len(granted) < room and (number := self.lowest_free(group)) is not None:
            self.grant(group.unit(number), worker)
            granted.append(number)
        return granted

    def lowest_free(self, group: TaskGroup) -> int | None:
        """The lowest undone micro-batch of the group that nobody has a lease of that has not ended."""
        if group.opened is not None and self._now() >= group.look_at:
            self._return_ended(group, group.opened)
        return group.lowest_free(lambda number: self.is_free(group.unit(number), group.opened))

    def _return_ended(self, group: TaskGroup, opened: float) -> None:
        """Finds the leases that have ended: whoever holds one may still be working, and does not say so."""
        now = self._now()
        # A lease that is granted, or prolonged, from now on ends later than that.
        group.look_at = now + self.lease_seconds
        for unit, holders in self._granted.items():
            if not group.holds(unit):
                continue
            begun = max(max(at, self._progress[worker]) for worker, at in holders.items())
            if self.is_free(unit, opened):
                group.return_(unit[2])
            else:
                group.look_at = min(group.look_at, max(begun, opened) + self.lease_seconds)

    def units(self, worker: str) -> tuple[Unit, ...]:
        """Unfinished units that were granted to the worker."""
        return tuple(self._held.get(worker, ()))

    def is_live(self, worker: str, unit: Unit, opened: float | None) -> bool:
        """Whether the worker has a lease of the unit that has not ended.

        Args:
            worker: Its incarnation.
            opened: When its group opened; None: not yet, so no lease of it ends.
        """
        granted = self._granted.get(unit, {}).get(worker)
        if granted is None or opened is None:
            return granted is not None
        return self._now() - max(granted, opened, self._progress[worker]) <= self.lease_seconds

    def is_free(self, unit: Unit, opened: float | None) -> bool:
        """Whether nobody has a lease of the unit that has not ended."""
        return not any(self.is_live(worker, unit, opened) for worker in self._granted.get(unit, ()))

    def holds(self, worker: str, unit: Unit) -> bool:
        """Whether the unit was granted to the worker, even if the lease has ended, and is not finished."""
        return worker in self._granted.get(unit, ())

    def longest_held(self, group: TaskGroup, opened: float) -> tuple[int, float] | None:
        """The undone micro-batch of the group in progress for longest, and since when; None: there is none."""
        since = {number: self._held_since(group.unit(number), opened) for number in group.undone()}
        longest = min(since, key=lambda number: since[number], default=None)
        return None if longest is None else (longest, since[longest])

    def _held_since(self, unit: Unit, opened: float) -> float:
        """When the last of its holders could start; `opened` where it has none."""
        begun = (max(at, self._progress[worker]) for worker, at in self._granted.get(unit, {}).items())
        return max([opened, *begun])

    def give_back(self, unit: Unit, worker: str) -> None:
        """Ends the worker's lease of the unit, if it has one; the unit is not finished."""
        self._held.get(worker, set()).discard(unit)
        self._drop_holder(unit, worker)

    def finish(self, unit: Unit, by: str = "") -> str | None:
        """Ends every lease of the unit.

        Args:
            by: The worker that finished it; "": the one it was granted to last.

        Returns:
            The worker that finished it, if known.
        """
        holders = self._granted.pop(unit, {})
        for worker in holders:
            self._held[worker].discard(unit)
        by = by or next(reversed(holders), "")
        if by in self._progress:
            # Only this worker: what a stopped worker still holds must not be held for longer.
            self._progress[by] = self._now()
        return by or None

    def _drop_holder(self, unit: Unit, worker: str) -> None:
        holders = self._granted.get(unit, {})
        holders.pop(worker, None)
        if not holders:
            self._granted.pop(unit, None)


class TaskBoard:
    """Decides which tasks a worker gets: of the current group, fetched ahead, or of an evaluation.

    Groups are trained one after the other (see `Schedule`). The current group takes pushes only once it is open
    (`open`); workers may fetch up to `MasterOptions.look_ahead` further groups of its epoch. Between epochs, and after
    the last one, the validation split may be evaluated; nothing of the next epoch is leased before that is opened.
    Other versions may be evaluated while training continues: a worker gets one such task per answer, after its tasks of
    the current group and before anything fetched ahead; where it can do nothing for that group, whatever it has fetched
    ahead; and a few at a time where training waits for evaluations.

    A worker's unfinished leases are limited to its fair share (`LeaseBook.grant_share`).

    A worker that waits for a version must keep asking: a free micro-batch of the current group is granted to it
    whatever it has fetched ahead. Where none is free and it has none itself, it may get a backup of one that another
    worker has been computing for long: the first result counts.
    """

    def __init__(
        self,
        schedule: Schedule,
        now: Callable[[], float],
        options: MasterOptions,
        position: int = 0,
        done: Iterable[int] = (),
    ) -> None:
        self._schedule = schedule
        self._now = now
        self._leases = LeaseBook(now, options.lease_seconds)
        self._backup_after = options.backup_after_s
        self.evaluations = EvaluationGroups()
        self.training = TrainingGroups(schedule, options.look_ahead, position, done)

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
            want: How many more tasks it can hold.

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
            if current or not self._schedule.by_epoch:
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
        if any(self._leases.lowest_free(group) is not None for group in self._leasable()):
            return True
        longest = self._longest_held(self._urgent)
        return longest is not None and longest[1] < self._now()

    def next_due(self) -> float:
        """A time before which nothing can be offered unless something else happens."""
        now = self._now()
        lease_seconds = self._leases.lease_seconds
        times = [now + min(lease_seconds, self._backup_after or lease_seconds)]
        times += [group.look_at for group in self._leasable() if group.opened is not None and group.undone_count]
        if (longest := self._longest_held(self._urgent)) is not None:
            times.append(longest[1])
        return max(now, min(times))

    @property
    def _urgent(self) -> TaskGroup | None:
        """The group that the next version, or training, waits for."""
        return self.training.current if self.is_open else self.evaluations.awaited_group

    def _leasable(self) -> Iterator[TaskGroup]:
        if (awaited := self.evaluations.awaited_group) is not None:
            yield awaited
        for ahead, group in enumerate(self.training.leasable()):
            if not self._schedule.by_epoch or (ahead == 0 and self.is_open):
                yield group
        yield from self.evaluations.concurrent

    def _return(self, unit: Unit) -> None:
        kind, version, number = unit
        if (group := self._group_of(kind, number, version)) is not None:
            group.return_(number)

    def reconcile(self, worker: str, holding: Iterable[Task], version: int) -> Lease:
        """Reconciles the worker's leases with the tasks that it reports to hold.

        Unleased tasks that it holds are granted to it: an earlier master may have leased
        them to it, or this one in an earlier session.

        Args:
            holding: All tasks that it has not finished.

        Returns:
            As `tasks` those that were leased to it in an answer that was lost; as `revoked` those it must drop.
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
        group, longest = self._urgent, self._longest_held(self._urgent)
        if group is None or longest is None or longest[1] >= self._now():
            return []
        if any(group.holds(unit) for unit in self._leases.units(worker)):
            return []
        self._leases.grant(group.unit(longest[0]), worker)
        return [self._task(group, longest[0], version)]

    def _longest_held(self, group: TaskGroup | None) -> tuple[int, float] | None:
        """The undone micro-batch that has been in progress for longest, and when a backup of it may be given."""
        if self._backup_after is None or group is None or group.opened is None:
            return None
        # Nothing of the group is free when this matters: so they are few.
        longest = self._leases.longest_held(group, group.opened)
        return None if longest is None else (longest[0], longest[1] + self._backup_after)
