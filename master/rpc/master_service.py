"""The Master service: decodes calls, hands them to a `MasterApi`, encodes the answers; and who is which worker."""

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from elastable.embedding_store.errors import BadInput, NotJoined, PermissionDenied
from elastable.embedding_store.support.futures import settle
from elastable.embedding_store.support.printable import printable
from elastable.embedding_store.wire.access.credentials import PROOF_KEYS, Proof, secret_of
from elastable.embedding_store.wire.messages.plain_data import from_message, to_message
from elastable.embedding_store.wire.messages.store_messages import wait_seconds
from elastable.embedding_store.wire.server.grpc_server import Service
from elastable.embedding_store.wire.server.handlers import Answer, Later, handlers_of
from elastable.embedding_store.wire.shared.shared_channel import SharedChannels
from elastable.master.api import (
    AsyncPushId,
    DenseSnapshot,
    Lease,
    Push,
    ServedMaster,
    Session,
    WorkerIdentity,
)
from elastable.master.rpc.messages import (
    MASTER_SERVICE,
    dense_frames,
    evaluation_from_frames,
    failure_from_message,
    push_from_frames,
    status_to_message,
)
from elastable.master.v1 import master_pb2

_KEY = PROOF_KEYS[Proof.SESSION]
_LENGTHS = range(16, 65)  # bytes of a secret
_MOST = 8_192  # names that are remembered beyond their sessions
_LONGEST_NAME = 256  # bytes


class Identities:
    """The names of workers (incarnations) and the secrets that they joined with. Safe to use from many threads.

    Secrets are kept and compared as their SHA-256, so how long a comparison takes tells nothing about one.

    Args:
        there: Whether a worker of that name has a session now; such names are never forgotten.
    """

    def __init__(self, there: Callable[[str], bool] = lambda name: False) -> None:
        self._there = there
        self._lock = threading.Lock()
        self._owner: dict[str, bytes] = {}  # name -> what its secret hashes to; the latest to join last
        self._names: dict[bytes, int] = {}  # such a hash -> how many names it has

    def claim(self, name: str, secret: bytes) -> None:
        """For `Join`: the name is that of whoever shows the secret of this call, from now on.

        Raises:
            BadInput: the call shows no secret, or one that cannot be.
            PermissionDenied: the name is another's.
        """
        if len(secret) not in _LENGTHS:
            raise BadInput(f"Join: show one secret, of 16 to 64 random bytes, as metadata {_KEY}, here and later")
        shown = _hashed(secret)
        with self._lock:
            self._require_own(name, shown)
            self._bind(name, shown)

    def require(self, secret: bytes, name: str = "") -> None:
        """Returns where whoever has joined with the secret of a call has that name; "": any.

        Raises:
            BadInput: the name is longer than any.
            PermissionDenied: it is another's.
            NotJoined: nobody has joined with that secret, or under that name.
        """
        if (shown := _hashed(secret)) not in self._names:
            raise NotJoined(f"nobody has joined here with the secret of this call ({_KEY}): Join, or join again")
        if not name:
            return
        if len(name.encode()) > _LONGEST_NAME:
            raise BadInput(f"an incarnation of {len(name.encode())} bytes; the most are {_LONGEST_NAME}")
        with self._lock:
            self._require_own(name, shown)
            if name not in self._owner:
                raise NotJoined(f"worker {name!r} has not joined here")

    def _require_own(self, name: str, shown: bytes) -> None:
        if self._owner.get(name, shown) != shown:
            raise PermissionDenied(f"worker {name!r} is another session's: it joined with another secret")

    def _bind(self, name: str, shown: bytes) -> None:
        if self._owner.pop(name, None) is None:
            self._names[shown] = self._names.get(shown, 0) + 1
        self._owner[name] = shown
        while len(self._owner) > _MOST:
            oldest = next((known for known in self._owner if not self._there(known)), None)
            if oldest is None:
                return
            hashed = self._owner.pop(oldest)
            self._names[hashed] -= 1
            if not self._names[hashed]:
                del self._names[hashed]


def _hashed(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply", bound=Message)

_LONGEST_REASON = 1024  # characters


def master_service(master: ServedMaster, channels: SharedChannels | None = None) -> Service:
    """The service that answers for `master`.

    A worker must join before its other calls, each of which shows the secret that it joined with.

    Args:
        master: What answers.
        channels: Where gradients may lie.
    """
    servicer = _MasterServicer(master, channels)
    handlers = handlers_of(MASTER_SERVICE, servicer)
    waiting = frozenset({"LeaseTasks", *(("ReportGradient",) if master.pushes_wait else ())})
    proofs = {Proof.SESSION: servicer.identities.require}
    return Service(MASTER_SERVICE, handlers, servicer.close, frozenset({"Join"}), waiting, master.not_ready, proofs)


class _MasterServicer:
    def __init__(self, master: ServedMaster, channels: SharedChannels | None) -> None:
        self._master = master
        self._channels = channels
        self._streams = SessionStreams(master)
        self.identities = Identities(self._streams.has_session)

    def close(self) -> None:
        """Ends all sessions: their streams would otherwise last as long as their workers."""
        self._streams.close()

    def join(self, request: master_pb2.JoinRequest, context: grpc.ServicerContext) -> Later[Any]:
        if not request.incarnation:
            raise BadInput("JoinRequest: its incarnation is empty; name every start of a worker differently")
        for what, name in (("incarnation", request.incarnation), ("host", request.host)):
            if len(name.encode()) > _LONGEST_NAME:
                raise BadInput(f"JoinRequest: its {what} has {len(name.encode())} bytes; the most are {_LONGEST_NAME}")
            if not name.isprintable():
                raise BadInput(f"JoinRequest: its {what} holds control characters: {printable(name, lines=False)}")
        worker = from_message(WorkerIdentity, request)
        self.identities.claim(worker.incarnation, secret_of(context, Proof.SESSION))
        return self._streams.open(worker, context)

    def lease_tasks(self, request: master_pb2.LeaseTasksRequest, session: bytes) -> Later[Lease]:
        self.identities.require(session, request.incarnation)
        wait_s = wait_seconds("LeaseTasksRequest", request.wait_ms)
        holding = from_message(Lease, request.holding).tasks if request.HasField("holding") else None
        lease = self._master.lease_tasks_later(request.incarnation, request.want, wait_s, holding)
        return Later(lease, partial(to_message, master_pb2.LeaseTasksReply))

    def pull_dense(self, request: master_pb2.PullDenseRequest, session: bytes) -> Later[DenseSnapshot | None]:
        self.identities.require(session, request.incarnation)
        version = request.version if request.HasField("version") else None
        wait_s = wait_seconds("PullDenseRequest", request.wait_ms)
        pulled = self._master.pull_dense_later(request.incarnation, version, wait_s)
        return Later(pulled, dense_frames)

    def report_gradient(self, frames: Iterator[bytes], session: bytes) -> Answer:
        push = push_from_frames(frames, self._channels)
        for name in _names(push):
            self.identities.require(session, name)
        reply = Later(self._master.report_gradient_later(push), partial(to_message, master_pb2.ReportGradientReply))
        return reply if self._master.pushes_wait else reply.at_once()

    def report_evaluation(self, frames: Iterator[bytes], session: bytes) -> master_pb2.ReportEvaluationReply:
        report = evaluation_from_frames(frames)
        self.identities.require(session, report.incarnation)
        outcome = self._master.report_evaluation(report)
        return to_message(master_pb2.ReportEvaluationReply, outcome=outcome)

    def report_failure(self, request: master_pb2.ReportFailureRequest, session: bytes) -> master_pb2.ReportFailureReply:
        self.identities.require(session, request.incarnation)
        incarnation = printable(request.incarnation, _LONGEST_NAME, lines=False)
        self._master.report_failure(incarnation, failure_from_message(request), request.fatal)
        return master_pb2.ReportFailureReply()

    def get_status(self, request: master_pb2.GetStatusRequest) -> master_pb2.GetStatusReply:
        return status_to_message(self._master.status())

    def stop_job(self, request: master_pb2.StopJobRequest) -> master_pb2.StopJobReply:
        self._master.stop(printable(request.reason, _LONGEST_REASON))
        return master_pb2.StopJobReply()


def _names(push: Push) -> tuple[str, ...]:
    """The workers in whose names a push is."""
    return (push.incarnation, push.id.incarnation) if isinstance(push.id, AsyncPushId) else (push.incarnation,)


class SessionStreams:
    """All workers' sessions that are open at one server."""

    def __init__(self, master: ServedMaster) -> None:
        self._master = master
        self._open: set[_SessionStream] = set()
        self._open_sessions: Counter[str] = Counter()  # open sessions by incarnation
        self._heard: Future[str] | None = None
        self._closed = False
        self._lock = Lock()

    def open(self, worker: WorkerIdentity, context: grpc.ServicerContext) -> Later[str | None]:
        """Opens one worker's session, which ends with its stream.

        Returns:
            The events of the session: the job, and once it ends, the reason. The stream stays open after that: the
            worker closes it.
        """
        ended = self._master.ended()
        opened = _SessionStream(self._master.join(worker), ended)
        with self._lock:
            self._open.add(opened)
            self._open_sessions[worker.incarnation] += 1
            closed = self._closed
            new, self._heard = ended is not self._heard, ended
        if new:
            ended.add_done_callback(self._job_ended)

        def leave() -> None:
            opened.end()
            with self._lock:
                if opened not in self._open:
                    return
                self._open.discard(opened)
                self._open_sessions[worker.incarnation] -= 1
                if not self._open_sessions[worker.incarnation]:
                    del self._open_sessions[worker.incarnation]

        # A broken connection calls back at once, so that its leases are free for others.
        if closed or not context.add_callback(leave):
            leave()
        elif ended.done():
            settle(opened.news, ended.result())
        session = opened.session
        job = to_message(master_pb2.JobDescription, session.job)
        event = master_pb2.JobEvent(job=job, store_session=session.store_session)
        return Later(opened.news, opened.rest, (event,))

    def has_session(self, incarnation: str) -> bool:
        """Whether the worker has a session open."""
        return incarnation in self._open_sessions

    def close(self) -> None:
        """Ends every session, and every one that comes after."""
        with self._lock:
            self._closed = True
            streams = tuple(self._open)
        for each in streams:
            each.end()

    def _job_ended(self, ended: Future[str]) -> None:
        with self._lock:
            streams = [each for each in self._open if each.ended is ended]
        for each in streams:
            settle(each.news, ended.result())


class _SessionStream:
    """One session, closed once, by whichever thread sees its end first.

    Attributes:
        session: Of the worker.
        ended: The end of its job.
        news: How the job ended; None: the session ended before.
    """

    def __init__(self, session: Session, ended: Future[str]) -> None:
        self.session = session
        self.ended = ended
        self.news: Future[str | None] = Future()
        self._over: Future[None] = Future()
        self._closed = False
        self._lock = Lock()

    def rest(self, news: str | None) -> Answer:
        """What the stream ends with."""
        if news is None:
            return ()
        event = master_pb2.JobEvent(finished=news)
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
