"""The workers of a job and their sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from elastable.master.api import JobSpec, Session, WorkerIdentity

__all__ = ["LocalSession", "Sessions"]


class Sessions:
    """Workers by incarnation. Not thread-safe: the master's lock guards it.

    A worker whose connection broke may open its next session before the end of the last
    one is noticed, so it counts until all of its sessions are closed.
    """

    def __init__(self) -> None:
        self._open: dict[str, tuple[WorkerIdentity, int]] = {}

    def __iter__(self) -> Iterator[WorkerIdentity]:
        return (identity for identity, _ in self._open.values())

    def __len__(self) -> int:
        return len(self._open)

    def identity(self, incarnation: str) -> WorkerIdentity:
        """The worker of an incarnation; only the incarnation is known of one without a session."""
        return self._open.get(incarnation, (WorkerIdentity(incarnation), 0))[0]

    def open(self, worker: WorkerIdentity) -> None:
        """Adds a session of the worker."""
        _, count = self._open.get(worker.incarnation, (worker, 0))
        self._open[worker.incarnation] = (worker, count + 1)

    def close(self, incarnation: str) -> bool:
        """Removes a session; returns whether it was the worker's last."""
        identity, count = self._open.pop(incarnation)
        if count > 1:
            self._open[incarnation] = (identity, count - 1)
        return count == 1


class LocalSession(Session):
    """A session in the master's own process."""

    def __init__(self, job: JobSpec, leave: Callable[[], None], master_alive: Callable[[], bool]) -> None:
        self._job = job
        self._leave = leave
        self._master_alive = master_alive
        self._closed = False

    @property
    def job(self) -> JobSpec:
        return self._job

    def alive(self) -> bool:
        return not self._closed and self._master_alive()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._leave()
