"""A master in another process, over gRPC."""

import secrets
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, wait
from threading import Event, Thread
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from elastable.embedding_store.closing import Closing
from elastable.embedding_store.errors import BadInput, DeadlineExceeded, ElastableError, StoreFailed, Unavailable
from elastable.embedding_store.support.futures import settle, settle_error
from elastable.embedding_store.wire.access.credentials import PROOF_KEYS, Credentials, Proof
from elastable.embedding_store.wire.channels.server_connection import MetadataChannel, ServerConnection
from elastable.embedding_store.wire.messages.frames import MAX_FRAME_BYTES, Upload
from elastable.embedding_store.wire.messages.plain_data import enum_member, from_message, to_message
from elastable.embedding_store.wire.messages.store_messages import LONGEST_WAIT_S
from elastable.embedding_store.wire.pushes.push_messages import SharedUpload
from elastable.embedding_store.wire.pushes.remote_store import RemoteStore
from elastable.master.api import (
    DenseSnapshot,
    EvaluationReport,
    JobSpec,
    JobStatus,
    Lease,
    MasterApi,
    Push,
    PushOutcome,
    PushReply,
    Task,
    WorkerIdentity,
)
from elastable.master.rpc.messages import (
    MASTER_SERVICE,
    dense_from_frames,
    evaluation_frames,
    push_frames,
    status_from_message,
)
from elastable.master.v1 import master_pb2, master_pb2_grpc

_HEADER_GROWTH_BYTES = 64


class MasterClient(MasterApi, Closing):
    """What a worker asks of a master, over one connection. Safe to use from many threads.

    A master that is not reached is tried again, with growing pauses, until the deadline: every call may be repeated, as
    a push is named by what it computed, and a worker that asks for tasks says what it holds.

    Args:
        address: `host:port` of the master; several with commas between, where it may come back at another one.
        deadline_s: Seconds for each call, on top of what it asks the master to wait.
        credentials: Of this client; None: those of the environment.
        session: The secret of the workers that join through this client, 16 to 64 bytes; None: a new one. Whoever
            shows it may speak for them.
        find: Says where the master is, if it is not reached where it was last; see `ServerConnection.follow`.

    Raises:
        BadInput: no such address or deadline can be, or it cannot be called with such credentials.
    """

    def __init__(
        self,
        address: str,
        deadline_s: float = 30.0,
        credentials: Credentials | None = None,
        session: bytes | None = None,
        find: Callable[[str], str | None] | None = None,
    ) -> None:
        self._connection = ServerConnection(address, deadline_s, credentials, moves=find is not None)
        if find is not None:
            self._connection.follow(lambda: find(self._connection.address))
        secret = session or secrets.token_bytes(16)
        channel = MetadataChannel(self._connection.channel, PROOF_KEYS[Proof.SESSION], secret)
        self._stub = master_pb2_grpc.MasterStub(channel)
        # Bulk frames pass as bytes. One frame goes as a unary call, which is the same on
        # the wire: gRPC starts a thread for each call that sends a stream, and has
        # another one to read a stream that comes.
        service = f"/{MASTER_SERVICE}"
        pull = (f"{service}/PullDense", master_pb2.PullDenseRequest.SerializeToString, None)
        self._pull, self._pull_one = channel.unary_stream(*pull), channel.unary_unary(*pull)
        self._dense_is_small = False
        self._join = channel.unary_stream(f"{service}/Join", master_pb2.JoinRequest.SerializeToString, None)
        self._report = Upload(channel, f"{service}/ReportEvaluation", master_pb2.ReportEvaluationReply.FromString)
        self._store = RemoteStore(self._connection)
        push = Upload(channel, f"{service}/ReportGradient", master_pb2.ReportGradientReply.FromString)
        self._gradients = SharedUpload(self._connection, push, push_frames, self._store.attach)

    @property
    def address(self) -> str:
        """`host:port` of the master."""
        return self._connection.address

    def store(self) -> RemoteStore:
        """The rows that the master serves, over this connection; which only the master changes."""
        return self._store

    def join(self, worker: WorkerIdentity) -> "RemoteSession":
        request = to_message(master_pb2.JoinRequest, worker)
        return self._connection.call(lambda timeout: RemoteSession(self._join(request), self.address, timeout))

    def lease_tasks(self, incarnation: str, want: int, wait_s: float, holding: Collection[Task] | None = None) -> Lease:
        held = None if holding is None else to_message(master_pb2.Holding, Lease(tuple(holding)))
        request = master_pb2.LeaseTasksRequest(
            incarnation=incarnation, want=want, wait_ms=_wait_ms(wait_s), holding=held
        )
        return from_message(Lease, self._connection.send(self._stub.LeaseTasks, request, wait_s))

    def pull_dense(self, incarnation: str, version: int | None, wait_s: float) -> DenseSnapshot | None:
        request = master_pb2.PullDenseRequest(incarnation=incarnation, version=version, wait_ms=_wait_ms(wait_s))

        def attempt(timeout: float) -> DenseSnapshot | None:
            frames = (
                [self._pull_one(request, timeout=timeout)]
                if self._dense_is_small
                else self._pull(request, timeout=timeout)
            )
            sizes: list[int] = []
            try:
                snapshot = dense_from_frames(_measured(frames, sizes))
            except BadInput as error:
                raise StoreFailed(f"{self.address} gave an answer that cannot be read: {error}") from error
            if snapshot is not None:
                # A job's dense part keeps its size; only its header grows with the version.
                self._dense_is_small = len(sizes) == 1 and sizes[0] <= MAX_FRAME_BYTES - _HEADER_GROWTH_BYTES
            return snapshot

        return self._connection.call(attempt, wait_s)

    def share_memory(self) -> None:
        """Lets a master on this host take gradients from memory; see `SharedUpload.share_memory`."""
        self._gradients.share_memory()

    def report_gradient(self, push: Push) -> PushReply:
        return from_message(PushReply, self._gradients.send(push))

    def report_evaluation(self, report: EvaluationReport) -> PushOutcome:
        reply = self._connection.call(lambda timeout: self._report(evaluation_frames(report), timeout))
        return enum_member(PushOutcome, reply.outcome, master_pb2.PushOutcome.DESCRIPTOR)

    def report_failure(self, incarnation: str, error: BaseException, fatal: bool) -> None:
        kind, message = type(error).__name__, str(error)
        self._connection.send(
            self._stub.ReportFailure,
            master_pb2.ReportFailureRequest(incarnation=incarnation, error=kind, message=message, fatal=fatal),
        )

    def status(self) -> JobStatus:
        return status_from_message(self._connection.send(self._stub.GetStatus, master_pb2.GetStatusRequest()))

    def stop(self, reason: str) -> None:
        self._connection.send(self._stub.StopJob, master_pb2.StopJobRequest(reason=reason))

    def close(self) -> None:
        """Closes the connection, and with it the sessions and the store. Closing twice is harmless."""
        self._gradients.close()
        self._connection.close()


def _measured(frames: Iterable[bytes], sizes: list[int]) -> Iterator[bytes]:
    for frame in frames:
        sizes.append(len(frame))
        yield frame


def _wait_ms(wait_s: float) -> int:
    if not 0 <= wait_s <= LONGEST_WAIT_S:
        raise BadInput(f"wait of {wait_s} s: ask for 0 to {LONGEST_WAIT_S:g} s, and call again")
    return round(wait_s * 1000)


class RemoteSession:
    """A worker's place in a job; while its stream is open the worker counts as alive.

    Args:
        stream: The call `Join`, just made; its events are bytes yet. (gRPC leaves a call open whose message it
            cannot parse, and a session would last as long.)
        address: Of the master, for messages.
        timeout_s: Seconds to wait for the job's description.

    Attributes:
        job: The job joined.
        store_session: As of `Session`.

    Raises:
        grpc.RpcError: the stream broke before the description came.
        DeadlineExceeded, Unavailable, BadSpec, StoreFailed: it did not come, or makes no sense.
    """

    def __init__(self, stream: Any, address: str, timeout_s: float) -> None:
        self._stream = stream
        self._address = address
        self._joined: Future[JobSpec] = Future()
        self.store_session = b""
        self._ended = Event()
        self._finished = ""
        # gRPC ends a stream at its deadline, so the session has none, and the
        # wait for its first event is our own.
        self._reader = Thread(target=self._read, name="master-session", daemon=True)
        self._reader.start()
        if not wait((self._joined,), timeout_s).done:
            self.close()
            raise DeadlineExceeded(f"{address} did not describe its job within {timeout_s:.3g} s")
        self.job = self._joined.result()

    @property
    def finished(self) -> str:
        """Why the job ended; "" while it lasts."""
        return self._finished

    def alive(self) -> bool:
        """False once the connection to the master is gone."""
        return not self._ended.is_set()

    def close(self) -> None:
        """Leaves: the worker's leases are free for others. Closing twice is harmless."""
        self._stream.cancel()
        self._reader.join(timeout=5.0)

    def _read(self) -> None:
        try:
            for event in self._stream:
                self._handle(master_pb2.JobEvent.FromString(event))
        except DecodeError as error:
            cannot = f"{self._address} sent a job description that cannot be read: {error}"
            settle_error(self._joined, StoreFailed(cannot))
        except (grpc.RpcError, ElastableError) as error:
            settle_error(self._joined, error)
        finally:
            self._stream.cancel()  # where it ended here and not there
            self._ended.set()
            ended = f"{self._address} ended the session before it described its job"
            settle_error(self._joined, Unavailable(ended))

    def _handle(self, event: master_pb2.JobEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "job":
            self.store_session = event.store_session
            settle(self._joined, from_message(JobSpec, event.job))
        elif kind == "finished":
            self._finished = event.finished
