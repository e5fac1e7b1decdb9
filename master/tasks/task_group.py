"""Groups of micro-batches: those of a version, of an epoch, or of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from elastable.master.api import TaskKind
from elastable.master.tasks.schedule import Schedule

__all__ = ["TaskGroup", "TaskGrouping", "Unit"]

Unit = tuple[TaskKind, int, int]
"""The kind of a task; the version that is evaluated, 0 of training; the micro-batch."""


class TaskGrouping(Protocol):
    """How a job's training is divided into groups, which are numbered from 0 and trained one after the other."""

    schedule: Schedule

    @property
    def group_count(self) -> int:
        """How many groups the job has."""

    @property
    def leases_ahead(self) -> bool:
        """Whether workers may fetch the micro-batches of a group before it is open."""

    def micro_batches(self, group: int) -> range:
        """The numbers within the job of the group's micro-batches."""

    def epoch_stop(self, group: int) -> int:
        """The first group behind the epoch that `group` belongs to."""

    def starts_epoch(self, group: int) -> bool:
        """Whether the group, which is not the first one, begins an epoch."""


@dataclass
class TaskGroup:
    """Micro-batches that must all be done before the job continues.

    Attributes:
        kind: Train or evaluate.
        numbers: The micro-batches (`Task.micro_batch`).
        version: The version that is evaluated; 0 of training.
        opened: When work on the group could start; None: not yet.
        done: The micro-batches that are done.
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
