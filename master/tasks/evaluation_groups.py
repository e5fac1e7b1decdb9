"""The versions whose validation split is being evaluated. Not thread-safe: the master's lock guards it."""

from __future__ import annotations

from elastable.master.api import TaskKind
from elastable.master.tasks.task_group import TaskGroup

__all__ = ["EvaluationGroups"]


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
