"""The plain data of `elastable.master.api`'s control calls as protobuf messages, and back."""

from collections.abc import Iterable
from typing import TypeVar

from google.protobuf.message import Message

from elastable.embedding_store.contract.row_data import FlushStatus
from elastable.embedding_store.errors import BadInput, ElastableError, JobFailed
from elastable.embedding_store.shards.server_contract import ServerStatus
from elastable.embedding_store.support.printable import printable
from elastable.embedding_store.wire.channels.status_codes import error_class
from elastable.embedding_store.wire.messages.store_messages import plain_values
from elastable.embedding_store.wire.pushes.push_messages import shard_status_from_message, shard_status_to_message
from elastable.master.api import (
    GoneWorker,
    JobSpec,
    JobStatus,
    Lease,
    PushOutcome,
    PushReply,
    Refusal,
    Task,
    TaskKind,
    WorkerIdentity,
    WorkerStatus,
)
from elastable.master.v1 import master_pb2

M = TypeVar("M", bound=Message)

MASTER_SERVICE: str = master_pb2.DESCRIPTOR.services_by_name["Master"].full_name
"""Full name of the service on the wire."""

_JOB_FIELDS = tuple(field.name for field in master_pb2.JobDescription.DESCRIPTOR.fields)
_KINDS = {TaskKind.TRAIN: master_pb2.TASK_KIND_TRAIN, TaskKind.EVALUATE: master_pb2.TASK_KIND_EVALUATE}
_OUTCOMES = {outcome: master_pb2.PushOutcome.Value(f"PUSH_OUTCOME_{outcome.name}") for outcome in PushOutcome}
_KINDS_BACK = {value: kind for kind, value in _KINDS.items()}
_OUTCOMES_BACK = {value: outcome for outcome, value in _OUTCOMES.items()}


def job_to_message(job: JobSpec) -> master_pb2.JobDescription:
    """The description of a job; the message has the fields of `JobSpec`, by name."""
    return master_pb2.JobDescription(**{name: getattr(job, name) for name in _JOB_FIELDS})


def job_from_message(message: master_pb2.JobDescription) -> JobSpec:
    """The job that a master describes.

    Raises:
        BadSpec: no job can be so.
    """
    return JobSpec(**plain_values(message, _JOB_FIELDS))


def lease_request(
    incarnation: str, want: int, wait_ms: int, holding: Iterable[Task] | None
) -> master_pb2.LeaseTasksRequest:
    """A worker's wish for tasks; None: it does not say what it holds."""
    held = None if holding is None else master_pb2.Holding(tasks=map(_task_to_message, holding))
    return master_pb2.LeaseTasksRequest(incarnation=incarnation, want=want, wait_ms=wait_ms, holding=held)


def holding_from_message(message: master_pb2.LeaseTasksRequest) -> tuple[Task, ...] | None:
    """What a worker says that it holds, if it says so.

    Raises:
        BadInput: a task of a kind that this program does not know.
    """
    return tuple(map(_task_from_message, message.holding.tasks)) if message.HasField("holding") else None


def lease_to_message(lease: Lease) -> master_pb2.LeaseTasksReply:
    """Tasks leased."""
    return master_pb2.LeaseTasksReply(
        tasks=map(_task_to_message, lease.tasks), finished=lease.finished, revoked=map(_task_to_message, lease.revoked)
    )


def lease_from_message(message: master_pb2.LeaseTasksReply) -> Lease:
    """Tasks leased.

    Raises:
        BadInput: a task of a kind that this program does not know.
    """
    tasks, revoked = (tuple(map(_task_from_message, some)) for some in (message.tasks, message.revoked))
    return Lease(tasks, message.finished, revoked)


def push_reply_to_message(reply: PushReply) -> master_pb2.ReportGradientReply:
    """What became of a push."""
    return master_pb2.ReportGradientReply(
        outcome=outcome_to_message(reply.outcome), reason=reply.reason, version=reply.version
    )


def push_reply_from_message(message: master_pb2.ReportGradientReply) -> PushReply:
    """What became of a push."""
    return PushReply(outcome_from_message(message.outcome), message.reason, message.version)


def outcome_to_message(outcome: PushOutcome) -> master_pb2.PushOutcome.ValueType:
    """The number of an outcome."""
    return _OUTCOMES[outcome]


def outcome_from_message(value: master_pb2.PushOutcome.ValueType) -> PushOutcome:
    """The outcome of a number.

    Raises:
        BadInput: an outcome that this program does not know.
    """
    if value not in _OUTCOMES_BACK:
        raise BadInput(f"push outcome {value}: known outcomes are {', '.join(PushOutcome)}; is the master newer?")
    return _OUTCOMES_BACK[value]


def failure_from_message(message: master_pb2.ReportFailureRequest) -> ElastableError:
    """The error that a worker reported: of its own class if that is an `ElastableError`."""
    kind, text = error_class(message.error), printable(message.message)
    return kind(text) if kind else JobFailed(f"{_name(message.error)}: {text}")


def status_to_message(status: JobStatus) -> master_pb2.GetStatusReply:
    """How far a job is; the message has the fields of `JobStatus`, by name."""
    names = (
        *("job", "state", "mode", "version", "versions_total", "epoch", "epochs", "records_trained", "store"),
        *("records_total", "records_per_s", "stopped", "metrics"),
    )
    return master_pb2.GetStatusReply(
        **{name: getattr(status, name) for name in names},
        workers=[_by_name(master_pb2.WorkerStatus, it.identity, it) for it in status.workers],
        gone=[_by_name(master_pb2.GoneWorker, it.identity, it) for it in status.gone],
        refusals=[_by_name(master_pb2.Refusal, it.worker, it) for it in status.refusals],
        servers=map(_server_to_message, status.servers),
        flush=None if status.flush is None else _by_name(master_pb2.FlushStatus, status.flush),
    )


def _by_name(kind: type[M], *sources: object) -> M:
    """A message whose fields are the attributes of the sources, by name; those that are None are left out."""
    names = [field.name for field in kind.DESCRIPTOR.fields]
    return kind(**{name: getattr(source, name) for source in sources for name in names if hasattr(source, name)})


def _server_to_message(server: ServerStatus) -> master_pb2.ServerStatus:
    shard = None if server.shard is None else shard_status_to_message(server.shard)
    return master_pb2.ServerStatus(
        address=server.address, shard=shard, waited_s=server.waited_s, failure=server.failure
    )


def status_from_message(message: master_pb2.GetStatusReply) -> JobStatus:
    """How far a job is."""
    return JobStatus(
        job=_name(message.job),
        state=_name(message.state),
        mode=_name(message.mode),
        version=message.version,
        versions_total=message.versions_total,
        epoch=message.epoch,
        epochs=message.epochs,
        records_trained=message.records_trained,
        metrics={_name(name): value for name, value in message.metrics.items()},
        workers=tuple(
            WorkerStatus(_identity(it), it.leases, it.micro_batches, it.records_per_s, it.silent_s)
            for it in message.workers
        ),
        store=_name(message.store),
        refusals=tuple(
            Refusal(WorkerIdentity("", _name(it.host), it.pid), _name(it.error), printable(it.message), it.count)
            for it in message.refusals
        ),
        flush=_flush_from_message(message.version, message.flush) if message.HasField("flush") else None,
        records_total=message.records_total,
        records_per_s=message.records_per_s,
        gone=tuple(GoneWorker(_identity(it), it.leases, it.micro_batches, it.seconds_ago) for it in message.gone),
        servers=tuple(map(_server_from_message, message.servers)),
        stopped=printable(message.stopped),
    )


def _identity(message: master_pb2.WorkerStatus | master_pb2.GoneWorker) -> WorkerIdentity:
    return WorkerIdentity(_name(message.incarnation), _name(message.host), message.pid)


def _server_from_message(message: master_pb2.ServerStatus) -> ServerStatus:
    shard = shard_status_from_message(message.shard) if message.HasField("shard") else None
    return ServerStatus(_name(message.address), shard, message.waited_s, printable(message.failure, 1024))


def _flush_from_message(version: int, it: master_pb2.FlushStatus) -> FlushStatus:
    failure = printable(it.failure) or None
    return FlushStatus(version, it.flushed_version, it.changed_rows, it.log_bytes, it.waits, it.waited_s, failure)


def _name(text: str) -> str:
    """A name or word of another process, fit for a terminal."""
    return printable(text, 1024, lines=False)


def _task_to_message(task: Task) -> master_pb2.Task:
    return master_pb2.Task(
        kind=_KINDS[task.kind],
        version=task.version,
        micro_batch=task.micro_batch,
        epoch=task.epoch,
        start=task.start,
        stop=task.stop,
    )


def _task_from_message(task: master_pb2.Task) -> Task:
    if task.kind not in _KINDS_BACK:
        raise BadInput(f"task of kind {task.kind}: known kinds are {', '.join(TaskKind)}; is the other side newer?")
    return Task(task.version, _KINDS_BACK[task.kind], task.micro_batch, task.epoch, task.start, task.stop)
