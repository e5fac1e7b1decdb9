"""Who holds which micro-batch and until when, and whether there is work for who waits. The master's lock guards it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from elastable.master.tasks.task_group import TaskGroup, Unit

__all__ = ["LeaseBook", "Offers"]


class LeaseBook:
    """The leases of all workers that have joined.

    A lease ends `lease_seconds` after the latest of: its grant, the opening of
    its group (a micro-batch fetched ahead cannot be worked on before), and the last
    micro-batch its worker finished (its others wait in the worker's queue). Then
    the micro-batch may be given to another worker, while the first one may still answer.

    Attributes:
        lease_seconds: As given.

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
            unit: The unit.
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
        """The undone micro-batch of the group that has been in progress for longest, and since when, if there is one.

        Args:
            group: Whose undone micro-batches are compared.
            opened: When it opened.
        """
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
            unit: The unit.
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


# Whether there is work for workers that wait for some, and when there may be. The master's lock guards it


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
