"""Groups of micro-batches: those of a version, of an epoch, or of an evaluation."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from elastable.master.api import TaskKind
from elastable.master.tasks.schedule import Schedule

__all__ = ["EvaluationGroups", "TaskGroup", "TrainingGroups", "Unit"]

Unit = tuple[TaskKind, int, int]
"""The kind of a task; the version that is evaluated, 0 of training; the micro-batch."""


@dataclass
class TaskGroup:
    """Micro-batches that must all be done before the job continues.

    Attributes:
        kind: Train or evaluate.
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
