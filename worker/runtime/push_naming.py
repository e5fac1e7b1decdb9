"""What the modes of a job mean for a worker: which version a task is computed on, and how its push is named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from elastable.master.api import AsyncPushId, JobSpec, PushId, SyncPushId, Task, TaskKind

__all__ = ["PushNaming", "push_naming"]


class PushNaming(Protocol):
    """Chosen once for a worker."""

    @property
    def looks_ahead(self) -> bool:
        """Whether rows are looked up before their task's turn: those of a numbered version do not change."""

    def version_of(self, task: Task) -> int | None:
        """The version that a task is computed on; None: whichever is current."""

    def computed_on(self, version: int) -> int | None:
        """`Push.computed_on` of a push computed on `version`."""

    def next_id(self, task: Task) -> PushId:
        """The name of the push of a task that has been computed."""


@dataclass
class _Sync:
    looks_ahead: bool = True

    def version_of(self, task: Task) -> int | None:
        return task.version

    def computed_on(self, version: int) -> int | None:
        return None

    def next_id(self, task: Task) -> PushId:
        return SyncPushId(task.version, task.micro_batch)


@dataclass
class _Async:
    incarnation: str
    looks_ahead = False  # rows are wanted as late as possible
    _sequence: int = 0

    def version_of(self, task: Task) -> int | None:
        return task.version if task.kind is TaskKind.EVALUATE else None

    def computed_on(self, version: int) -> int | None:
        return version

    def next_id(self, task: Task) -> PushId:
        self._sequence += 1
        return AsyncPushId(self.incarnation, self._sequence, task.micro_batch)


def push_naming(job: JobSpec, incarnation: str, rows_change: bool = False) -> PushNaming:
    """The naming of a job's mode.

    Args:
        job: The job joined.
        incarnation: Of the worker.
        rows_change: Whether callbacks may write rows of a version after its commit.
    """
    return _Sync(looks_ahead=not rows_change) if job.mode == "sync" else _Async(incarnation)
