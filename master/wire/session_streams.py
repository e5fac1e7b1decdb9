"""Workers' sessions on the server: each lasts as long as its stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from threading import Event, Lock

import grpc

from elastable.embedding_store.errors import ElastableError
from elastable.master.api import JobStatus, MasterApi, Session, WorkerIdentity
from elastable.master.v1 import master_pb2
from elastable.master.wire.messages import job_to_message

__all__ = ["ENDED_STATES", "SessionStreams"]

ENDED_STATES = ("finished", "failed")
"""States of a job in which no task is leased any more."""

_POLL_S = 0.5  # between two checks of the job's version


class SessionStreams:
    """All workers' sessions that are open at one server."""

    def __init__(self, master: MasterApi) -> None:
        self._master = master
        self._open: set[_SessionStream] = set()
        self._open_sessions: Counter[str] = Counter()  # open sessions by incarnation
        self._closed = False
        self._lock = Lock()

    def events(self, worker: WorkerIdentity, context: grpc.ServicerContext) -> Iterator[master_pb2.JobEvent]:
        """The events of one worker's session, which ends with this stream.

        Yields:
            The job; then each new version, and once the reason
            why the job ended. The stream stays open after that: the worker closes it.
        """
        stream = _SessionStream(self._master.join(worker))
        with self._lock:
            self._open.add(stream)
            self._open_sessions[worker.incarnation] += 1
            closed = self._closed
        # A broken connection calls back at once, so that its leases are free before the next check.
        if closed or not context.add_callback(stream.end):
            stream.end()
        try:
            yield master_pb2.JobEvent(job=job_to_message(stream.session.job))
            yield from self._news(stream)
        finally:
            stream.end()
            with self._lock:
                self._open.discard(stream)
                self._open_sessions[worker.incarnation] -= 1
                if not self._open_sessions[worker.incarnation]:
                    del self._open_sessions[worker.incarnation]

    def has_session(self, incarnation: str) -> bool:
        """Whether the worker has a session open."""
        return incarnation in self._open_sessions

    def _news(self, stream: _SessionStream) -> Iterator[master_pb2.JobEvent]:
        version, end_sent = -1, False
        while not stream.ended.wait(_POLL_S):
            try:
                status = self._master.status()
            except ElastableError:
                continue  # a store that fails for a while is no reason to end sessions
            if status.version != version:
                version = status.version
                yield master_pb2.JobEvent(version=version)
            if not end_sent and status.state in ENDED_STATES:
                end_sent = True
                yield master_pb2.JobEvent(finished=_reason(status))

    def close(self) -> None:
        """Ends every session, and every one that comes after."""
        with self._lock:
            self._closed = True
            streams = tuple(self._open)
        for stream in streams:
            stream.end()


class _SessionStream:
    """One session, closed once, by whichever thread sees its end first."""

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
