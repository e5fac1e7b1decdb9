"""Who holds which micro-batch, and until when. Not thread-safe: the master's lock guards it."""

from __future__ import annotations

from collections.abc import Callable

from elastable.master.api import TaskKind

__all__ = ["LeaseBook", "Unit"]

Unit = tuple[TaskKind, int, int]
"""What is done; the version that is evaluated, 0 of training; the micro-batch."""


class LeaseBook:
    """Leases of units of work, given out in groups that open at a certain time.

    A lease ends `lease_seconds` after the latest of: its grant, the opening of
    its group (a unit fetched ahead cannot be worked on before), and the last
    unit its worker finished (its others wait in the worker's queue). Then the
    unit may be given to another worker, while the first one may still answer.

    Args:
        now: Monotonic clock, in seconds.
        lease_seconds: How long a worker may take for a unit.
    """

    def __init__(self, now: Callable[[], float], lease_seconds: float) -> None:
        self._now = now
        self._lease_seconds = lease_seconds
        self._granted: dict[Unit, dict[str, float]] = {}
        self._held: dict[str, set[Unit]] = {}
        self._progress: dict[str, float] = {}

    @property
    def workers(self) -> tuple[str, ...]:
        """Workers that are there, in the order in which they joined."""
        return tuple(self._held)

    def is_there(self, worker: str) -> bool:
        """Whether the worker is there."""
        return worker in self._held

    def join(self, worker: str) -> None:
        """Counts a worker as there; joining twice is harmless."""
        self._held.setdefault(worker, set())
        self._progress.setdefault(worker, self._now())

    def leave(self, worker: str) -> None:
        """Everything the worker holds is free again at once."""
        for unit in self._held.pop(worker, set()):
            self._drop_holder(unit, worker)
        self._progress.pop(worker, None)

    def grant(self, unit: Unit, worker: str) -> None:
        """Gives the unit to the worker; whoever held it before may still answer."""
        holders = self._granted.setdefault(unit, {})
        holders.pop(worker, None)  # dicts keep the place of a key: the latest grant must stand last
        holders[worker] = self._now()
        self._held[worker].add(unit)

    def units(self, worker: str) -> tuple[Unit, ...]:
        """Units that the worker was given and that nobody has finished."""
        return tuple(self._held.get(worker, ()))

    def is_live(self, worker: str, unit: Unit, opened: float | None) -> bool:
        """Whether the worker's lease of the unit has not ended.

        Args:
            worker: Its incarnation.
            unit: The unit.
            opened: When its group opened; None: not yet, so no lease of it ends.
        """
        granted = self._granted.get(unit, {}).get(worker)
        if granted is None or opened is None:
            return granted is not None
        return self._now() - max(granted, opened, self._progress[worker]) <= self._lease_seconds

    def is_free(self, unit: Unit, opened: float | None) -> bool:
        """Whether nobody has a lease of the unit that has not ended."""
        return not any(self.is_live(worker, unit, opened) for worker in self._granted.get(unit, ()))

    def holds(self, worker: str, unit: Unit) -> bool:
        """Whether the unit was given to the worker, live or ended, and is not finished."""
        return worker in self._granted.get(unit, ())

    def held_since(self, unit: Unit, opened: float) -> float:
        """When the last of its holders could begin with it; `opened` where it has none."""
        begun = (max(at, self._progress[worker]) for worker, at in self._granted.get(unit, {}).items())
        return max([opened, *begun])

    def give_back(self, unit: Unit, worker: str) -> None:
        """Ends the worker's lease of the unit, if it has one; nobody has finished it."""
        self._held.get(worker, set()).discard(unit)
        self._drop_holder(unit, worker)

    def finish(self, unit: Unit, by: str = "") -> str | None:
        """Ends every lease of the unit.

        Args:
            unit: The unit.
            by: Who finished it; "": the worker to whom it was given last.

        Returns:
            Who finished it, if anybody is known to have.
        """
        holders = self._granted.pop(unit, {})
        for worker in holders:
            self._held[worker].discard(unit)
        by = by or next(reversed(holders), "")
        if by in self._progress:
            # Nobody else: what a stopped worker still holds must not be held for longer.
            self._progress[by] = self._now()
        return by or None

    def _drop_holder(self, unit: Unit, worker: str) -> None:
        holders = self._granted.get(unit, {})
        holders.pop(worker, None)
        if not holders:
            self._granted.pop(unit, None)
