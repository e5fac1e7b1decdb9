"""Sessions of workers on the server's side: each lasts as long as its stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from threading import Event, Lock

import grpc

from elastable.embedding_store.errors import ElastableError
from elastable.master.api import JobStatus, MasterApi, Session, WorkerIdentity
from elastable.master.v1 import master_pb2
from elastable.master.wire.messages import job_to_message

__all__ = ["ENDED_STATES", "Attendances"]

ENDED_STATES = ("finished", "failed")
"""States of a job in which no task will ever come again."""

_LOOK_S = 0.5  # between two looks at the job's version


class Attendances:
    """All workers' sessions that are open at one server."""

    def __init__(self, master: MasterApi) -> None:
        self._master = master
        self._open: set[_Attendance] = set()
        self._there: Counter[str] = Counter()  # open sessions by incarnation
        self._closed = False
        self._lock = Lock()

    def events(self, worker: WorkerIdentity, context: grpc.ServicerContext) -> Iterator[master_pb2.JobEvent]:
        """What one worker is told while it stays; its session ends with this stream.

        Yields:
            The job; then the version where it has changed, and once the reason
            why the job ended. The stream stays open after that: the worker leaves.
        """
        attendance = _Attendance(self._master.join(worker))
        with self._lock:
            self._open.add(attendance)
            self._there[worker.incarnation] += 1
            closed = self._closed
        # A broken connection calls back at once, so that its leases are free before the next look.
        if closed or not context.add_callback(attendance.end):
            attendance.end()
        try:
            yield master_pb2.JobEvent(job=job_to_message(attendance.session.job))
            yield from self._news(attendance)
        finally:
            attendance.end()
            with self._lock:
                self._open.discard(attendance)
                self._there[worker.incarnation] -= 1
                if not self._there[worker.incarnation]:
                    del self._there[worker.incarnation]

    def is_there(self, incarnation: str) -> bool:
        """Whether the worker has a session open."""
        return incarnation in self._there

    def _news(self, attendance: _Attendance) -> Iterator[master_pb2.JobEvent]:
        version, told_end = -1, False
        while not attendance.ended.wait(_LOOK_S):
            try:
                status = self._master.status()
            except ElastableError:
                continue  # a store that fails for a while is no reason to send workers away
            if status.version != version:
                version = status.version
                yield master_pb2.JobEvent(version=version)
            if not told_end and status.state in ENDED_STATES:
                told_end = True
                yield master_pb2.JobEvent(finished=_reason(status))

    def close(self) -> None:
        """Ends every session, and every one that comes after."""
        with self._lock:
            self._closed = True
            attendances = tuple(self._open)
        for attendance in attendances:
            attendance.end()


class _Attendance:
    """One session, closed once, by whoever sees its end first."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.ended = Event()
        self._lock = Lock()

    def end(self) -> None:
        with self._lock:
            if self.ended.is_set():
                return
            self.ended.set()
        self.session.close()


def _reason(status: JobStatus) -> str:
    return f"the job {status.state} at version {status.version} of {status.versions_total}"
