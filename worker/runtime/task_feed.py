"""Leases, reads and plans tasks ahead of time, in a separate thread."""

import threading
from collections.abc import Callable

from elastable.embedding_store.errors import NotJoined
from elastable.master.api import MasterApi, Task, TaskKind
from elastable.worker.runtime.compute import Prepared

_LOOK_EVERY_S = 0.25
_LEASE_WAIT_S = 20.0  # at the master, where waiting costs nothing, and asking does
_IDLE_WAIT_S = 0.1
_FEW = 3  # with fewer prepared evaluations the master is asked for more


class TaskFeed:
    """Keeps a few tasks prepared, the earliest first.

    Only data and ids are prepared, never values: rows and dense variables are read when a task's version is committed.
    Each request to the master lists the tasks held here, so a lost reply is repeated and tasks done elsewhere are
    dropped.

    Attributes:
        outside: Whether the master reported that this worker has no session.
    """

    def __init__(self, master: MasterApi, incarnation: str, prepare: Callable[[Task], Prepared], ahead: int) -> None:
        self._master = master
        self._incarnation = incarnation
        self._prepare = prepare
        self._ahead = ahead
        self._ready: dict[Task, Prepared] = {}
        self._life = 0  # sessions joined since the first
        self.outside = False
        self._idle = False
        self._changed = threading.Condition()
        self._stopping = False
        self._finished = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="elastable-task-feed", daemon=True)

    def start(self) -> None:
        """Starts leasing."""
        self._thread.start()

    def head(self, wait_s: float) -> Prepared | None:
        """The earliest prepared task, waiting up to `wait_s` seconds for one.

        Raises:
            ElastableError: the error of leasing or preparing.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._ready or self._finished or self._failure or self.outside, timeout=wait_s
            )
            if self._failure is not None:
                raise self._failure
            return self._ready[min(self._ready)] if self._ready else None

    def refuse_failed(self) -> None:
        """Raises the error of leasing or preparing, if there is one: the job may be over."""
        with self._changed:
            if self._failure is not None:
                raise self._failure

    def following(self, prepared: Prepared) -> Prepared | None:
        """The earliest prepared task after `prepared`, if there is one."""
        with self._changed:
            behind = [task for task in self._ready if task > prepared.task]
            return self._ready[min(behind)] if behind else None

    def idle(self) -> None:
        """Records that no prepared task can be computed yet: the master may have one that can."""
        with self._changed:
            self._idle = True
            self._changed.notify_all()

    def finished(self) -> bool:
        """Whether no task is left or will come; False after a failure, which `head` raises."""
        with self._changed:
            return self._finished and not self._ready and self._failure is None

    def done(self, prepared: Prepared) -> None:
        """Removes a task that was computed or dropped."""
        with self._changed:
            self._ready.pop(prepared.task, None)
            if prepared.task.kind is TaskKind.EVALUATE:
                # There may be more; tasks prepared ahead would leave no room for them, and may have to wait for them.
                self._idle |= sum(task.kind is TaskKind.EVALUATE for task in self._ready) < _FEW
            self._changed.notify_all()

    def begin_anew(self, keep: bool) -> None:
        """Records that a new session was opened, perhaps with another master.

        Args:
            keep: Whether to keep prepared tasks: the next request lists them, and the master revokes what is obsolete.
        """
        with self._changed:
            self.outside = False
            self._life += 1
            if not keep:
                self._ready.clear()
            self._changed.notify_all()

    def stop(self) -> None:
        """Makes the thread end; what it may be waiting for at the master ends with the worker's session."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def join(self) -> None:
        """Waits a few seconds for the thread, which was stopped."""
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        try:
            while self._lease_more():
                pass
        except Exception as error:  # noqa: BLE001 - a reader may raise anything; the loop re-raises it
            self._end(error)

    def _lease_more(self) -> bool:
        with self._changed:
            # Late, for several at a time: one call per task would cost the master too much.
            self._changed.wait_for(
                lambda: self._stopping or self._idle or 4 * len(self._ready) <= self._ahead, timeout=_LOOK_EVERY_S
            )
            if self._stopping:
                return False
            want = max(0, self._ahead - len(self._ready))
            wait_s = _LEASE_WAIT_S if want else _IDLE_WAIT_S if self._idle else 0.0
            self._idle = False
            holding, life = tuple(self._ready), self._life
        # With nothing wanted the call is made now and then all the same: a task
        # of the version in work may be handed on from a worker that died.
        try:
            lease = self._master.lease_tasks(self._incarnation, want, wait_s, holding)
        except NotJoined:
            # The session ended, or the master was replaced: the loop joins again.
            with self._changed:
                self.outside = life == self._life
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._stopping, timeout=_LOOK_EVERY_S)
            return True
        with self._changed:
            for task in lease.revoked:  # others did it, or its version is no longer handed out
                self._ready.pop(task, None)
        for task in lease.tasks:
            prepared = self._prepare(task)
            with self._changed:
                if life != self._life:
                    return True  # leased by the previous master; the new one decides
                self._ready[task] = prepared
                self._changed.notify_all()
        if lease.finished:
            self._end(None)
        return not lease.finished

    def _end(self, failure: BaseException | None) -> None:
        with self._changed:
            self._finished = True
            self._failure = failure
            self._changed.notify_all()
