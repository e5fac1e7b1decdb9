"""Micro-batches that belong together: those of a version, of an epoch, or of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from elastable.master.api import TaskKind
from elastable.master.tasks.leases import Unit

__all__ = ["TaskGroup"]


@dataclass
class TaskGroup:
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
        """How many are not done."""
        return len(self.numbers) - len(self.done)

    def unit(self, number: int) -> Unit:
        """The name of one of them in the book of leases."""
        return self.kind, self.version, number

    def holds(self, unit: Unit) -> bool:
        """Whether a unit of the book of leases is one of them."""
        return unit[:2] == (self.kind, self.version) and unit[2] in self.numbers

    def undone(self) -> Iterator[int]:
        """Those that are not done, in order."""
        # Nothing below `_lowest` is undone: an epoch of a million tasks is not searched anew at every lease.
        while self._lowest in self.done:
            self._lowest += 1
        return (number for number in range(self._lowest, self.numbers.stop) if number not in self.done)
