"""Groups of micro-batches: those of a version, of an epoch, or of an evaluation."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
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
