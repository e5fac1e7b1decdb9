"""The groups of micro-batches that training goes through, one after the other. The master's lock guards it."""

from __future__ import annotations

from collections.abc import Iterable

from elastable.master.api import TaskKind
from elastable.master.tasks.task_group import TaskGroup, TaskGrouping

__all__ = ["TrainingGroups"]


class TrainingGroups:
    """The current group, and those of its epoch that workers may fetch ahead.

    Attributes:
        position: The number of the current group.

    Args:
        grouping: How the job's training is divided.
        look_ahead: How many groups behind the current one workers may fetch.
        position: The number of the group that is trained next.
        done: Micro-batches of that group that are done.
    """

    def __init__(self, grouping: TaskGrouping, look_ahead: int, position: int, done: Iterable[int]) -> None:
        self._grouping = grouping
        self._look_ahead = look_ahead if grouping.leases_ahead else 0
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
        return self._grouping.starts_epoch(self.position)

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
        epoch_stop, stop = self._grouping.epoch_stop(self.position), self.position + self._look_ahead + 1
        for group in range(self.position + len(self._groups), min(stop, epoch_stop, self._grouping.group_count)):
            self._groups.append(TaskGroup(TaskKind.TRAIN, self._grouping.micro_batches(group)))
