"""Reported failures and the status of a job as messages, and back: what differs from its message, field by field."""

from functools import partial

from elastable.embedding_store.contract.row_data import FlushStatus
from elastable.embedding_store.errors import ElastableError, JobFailed
from elastable.embedding_store.shards.server_contract import ServerStatus
from elastable.embedding_store.support.printable import printable
from elastable.embedding_store.wire.channels.status_codes import error_class
from elastable.embedding_store.wire.messages.plain_data import from_message, to_message
from elastable.embedding_store.wire.pushes.push_messages import shard_status_from_message
from elastable.master.api import GoneWorker, JobStatus, Refusal, StreamStatus, WorkerIdentity, WorkerStatus
from elastable.master.v1 import master_pb2

MASTER_SERVICE: str = master_pb2.DESCRIPTOR.services_by_name["Master"].full_name
"""Full name of the service on the wire."""

_name = partial(printable, most=1024, lines=False)  # a name or word of another process, fit for a terminal


def failure_from_message(message: master_pb2.ReportFailureRequest) -> ElastableError:
    """The error that a worker reported: of its own class if that is an `ElastableError`."""
    kind, text = error_class(message.error), printable(message.message)
    return kind(text) if kind else JobFailed(f"{_name(message.error)}: {text}")


def status_to_message(status: JobStatus) -> master_pb2.GetStatusReply:
    """How far a job is; of workers, the fields of their identity come first."""
    return to_message(
        master_pb2.GetStatusReply,
        status,
        workers=[to_message(master_pb2.WorkerStatus, it.identity, it) for it in status.workers],
        gone=[to_message(master_pb2.GoneWorker, it.identity, it) for it in status.gone],
        refusals=[to_message(master_pb2.Refusal, it.worker, it) for it in status.refusals],
    )


def status_from_message(message: master_pb2.GetStatusReply) -> JobStatus:
    """How far a job is; its texts are fit for a terminal."""
    return from_message(
        JobStatus,
        message,
        _name,
        workers=tuple(from_message(WorkerStatus, it, identity=_identity(it)) for it in message.workers),
        gone=tuple(from_message(GoneWorker, it, identity=_identity(it)) for it in message.gone),
        refusals=tuple(
            from_message(
                Refusal,
                it,
                _name,
                worker=from_message(WorkerIdentity, it, _name, incarnation=""),
                message=printable(it.message),
            )
            for it in message.refusals
        ),
        flush=_flush(message.version, message.flush) if message.HasField("flush") else None,
        servers=tuple(map(_server, message.servers)),
        stopped=printable(message.stopped),
        stream=from_message(StreamStatus, message.stream, _name) if message.HasField("stream") else None,
    )


def _identity(message: master_pb2.WorkerStatus | master_pb2.GoneWorker) -> WorkerIdentity:
    return from_message(WorkerIdentity, message, _name)


def _server(message: master_pb2.ServerStatus) -> ServerStatus:
    shard = shard_status_from_message(message.shard) if message.HasField("shard") else None
    return from_message(ServerStatus, message, _name, shard=shard, failure=printable(message.failure, 1024))


def _flush(version: int, message: master_pb2.FlushStatus) -> FlushStatus:
    return from_message(FlushStatus, message, version=version, failure=printable(message.failure) or None)
