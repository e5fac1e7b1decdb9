"""Whether there is work for workers that wait for some, and when there may be. The master's lock guards it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from elastable.master.tasks.leases import LeaseBook
from elastable.master.tasks.task_group import TaskGroup

__all__ = ["Offers"]


class Offers:
    """What can be leased of some groups, and backups of what is in progress.

    Args:
        leases: Who holds what.
        now: Monotonic clock, in seconds.
        backup_after_s: As in `MasterOptions`.
    """

    def __init__(self, leases: LeaseBook, now: Callable[[], float], backup_after_s: float | None) -> None:
        self._leases = leases
        self._now = now
        self._backup_after = backup_after_s

    def any(self, groups: Iterable[TaskGroup], urgent: TaskGroup | None) -> bool:
        """Whether a worker that asks now may get something of the groups, or a backup of the urgent one's."""
        if any(self._leases.lowest_free(group) is not None for group in groups):
            return True
        due = self._backup_due(urgent)
        return due is not None and due < self._now()

    def next_due(self, groups: Iterable[TaskGroup], urgent: TaskGroup | None) -> float:
        """A time before which there is nothing more unless something happens: leases end, and backups are due."""
        now = self._now()
        soonest = min(self._leases.lease_seconds, self._backup_after or self._leases.lease_seconds)
        times = [now + soonest]
        times += [group.look_at for group in groups if group.opened is not None and group.undone_count]
        if (due := self._backup_due(urgent)) is not None:
            times.append(due)
        return max(now, min(times))

    def back_up(self, group: TaskGroup | None, worker: str) -> int | None:
        """Grants the micro-batch that has been in progress for longest to a worker without one of that group."""
        due = self._backup_due(group)
        if group is None or due is None or due >= self._now():
            return None
        if any(group.holds(unit) for unit in self._leases.units(worker)):
            return None
        longest = self._leases.longest_held(group, group.opened or 0.0)
        if longest is None:
            return None
        self._leases.grant(group.unit(longest[0]), worker)
        return longest[0]

    def _backup_due(self, group: TaskGroup | None) -> float | None:
        """When a backup may be given."""
        if self._backup_after is None or group is None or group.opened is None:
            return None
        # Nothing of the group is free when this matters: so they are few.
        longest = self._leases.longest_held(group, group.opened)
        return None if longest is None else longest[1] + self._backup_after
