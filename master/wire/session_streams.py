"""Workers' sessions on the server: each lasts as long as its stream, and holds no thread."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from threading import Lock

import grpc

from elastable.embedding_store.support.futures import settle
from elastable.embedding_store.wire.server.handlers import Answer, Later
from elastable.master.api import JobStatus, Session, WorkerIdentity
from elastable.master.jobs.served_master import ServedMaster
from elastable.master.v1 import master_pb2
from elastable.master.wire.messages import job_to_message

__all__ = ["SessionStreams"]


class SessionStreams:
    """All workers' sessions that are open at one server."""

    def __init__(self, master: ServedMaster) -> None:
        self._master = master
        self._open: set[_SessionStream] = set()
        self._open_sessions: Counter[str] = Counter()  # open sessions by incarnation
        self._heard: Future[JobStatus] | None = None
        self._closed = False
        self._lock = Lock()

    def open(self, worker: WorkerIdentity, context: grpc.ServicerContext) -> Later[JobStatus | None]:
        """Opens one worker's session, which ends with its stream.

        Returns:
            The events of the session: the job, and once it ends, the reason. The stream stays open after that: the
            worker closes it.
        """
        ended = self._master.ended()
        stream = _SessionStream(self._master.join(worker), ended)
        with self._lock:
            self._open.add(stream)
            self._open_sessions[worker.incarnation] += 1
            closed = self._closed
            new, self._heard = ended is not self._heard, ended
        if new:
            ended.add_done_callback(self._job_ended)

        def leave() -> None:
            stream.end()
            with self._lock:
                if stream not in self._open:
                    return
                self._open.discard(stream)
                self._open_sessions[worker.incarnation] -= 1
                if not self._open_sessions[worker.incarnation]:
                    del self._open_sessions[worker.incarnation]

        # A broken connection calls back at once, so that its leases are free for others.
        if closed or not context.add_callback(leave):
            leave()
        elif ended.done():
            settle(stream.news, ended.result())
        event = master_pb2.JobEvent(job=job_to_message(stream.session.job))
        return Later(stream.news, stream.rest, (event,))

    def has_session(self, incarnation: str) -> bool:
        """Whether the worker has a session open."""
        return incarnation in self._open_sessions

    def close(self) -> None:
        """Ends every session, and every one that comes after."""
        with self._lock:
            self._closed = True
            streams = tuple(self._open)
        for stream in streams:
            stream.end()

    def _job_ended(self, ended: Future[JobStatus]) -> None:
        with self._lock:
            streams = [stream for stream in self._open if stream.ended is ended]
        for stream in streams:
            settle(stream.news, ended.result())


class _SessionStream:
    """One session, closed once, by whichever thread sees its end first.

    Attributes:
        session: Of the worker.
        ended: The end of its job.
        news: How the job ended; None: the session ended before.
    """

    def __init__(self, session: Session, ended: Future[JobStatus]) -> None:
        self.session = session
        self.ended = ended
        self.news: Future[JobStatus | None] = Future()
        self._over: Future[None] = Future()
        self._closed = False
        self._lock = Lock()

    def rest(self, status: JobStatus | None) -> Answer:
        """What the stream ends with."""
        if status is None:
            return ()
        event = master_pb2.JobEvent(finished=_reason(status))
        return Later(self._over, lambda _: (), (event,))

    def end(self) -> None:
        """Closes the session, and its stream where it is still open."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.session.close()
        settle(self.news, None)
        settle(self._over, None)


def _reason(status: JobStatus) -> str:
    return f"the job {status.state} at version {status.version} of {status.versions_total}"
