"""What master and workers send each other, as messages and frames, and back: what differs from its message."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from elastable.embedding_store.contract.row_data import FlushStatus
from elastable.embedding_store.errors import BadInput, ElastableError, JobFailed
from elastable.embedding_store.shards.server_contract import ServerStatus, Slices
from elastable.embedding_store.support.array_body import BodyPlan
from elastable.embedding_store.support.printable import printable
from elastable.embedding_store.wire.channels.status_codes import error_class
from elastable.embedding_store.wire.messages.frames import FrameReader, encode
from elastable.embedding_store.wire.messages.plain_data import from_message, to_message
from elastable.embedding_store.wire.pushes.push_messages import (
    declare_slices,
    frames_of,
    plan_slices,
    read_body,
    shard_status_from_message,
)
from elastable.embedding_store.wire.shared.shared_channel import SharedChannel, SharedChannels
from elastable.master.api import (
    AsyncPushId,
    DenseSnapshot,
    Divisor,
    EvaluationReport,
    GoneWorker,
    GradientPart,
    JobStatus,
    Push,
    PushId,
    Refusal,
    StreamStatus,
    SyncPushId,
    Tensor,
    WorkerIdentity,
    WorkerStatus,
)
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


_INTEGERS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
_DTYPES = {name: np.dtype(name) for name in ("float16", "float32", "float64", *_INTEGERS, "bool")}
_INT64, _FLOAT32 = _DTYPES["int64"], _DTYPES["float32"]

T = TypeVar("T")


def push_frames(push: Push, channel: SharedChannel | None = None) -> Iterator[bytes]:
    """The frames of one ReportGradient.

    Args:
        push: What is pushed.
        channel: Where to lay its arrays down, if that is worth it; None: they travel in the frames.

    Raises:
        BadGradient: an array that the wire has no place for; names its table.
    """
    arrays_apart = dict.fromkeys(("dense", "slices", "states", "metrics", "losses", "parts"))
    header = to_message(master_pb2.GradientHeader, push, push=_id_to_message(push.id), **arrays_apart)
    _declare_losses(header.losses, push.losses)
    arrays = _declare(header.dense, push.dense) + declare_slices(header.slices, push.slices)
    arrays += _declare(header.states, push.states) + _declare(header.metrics, push.metrics)
    for part in push.parts:
        entry = header.parts.add(divisor=to_message(master_pb2.Divisor, part.divisor), places=part.dense)
        _declare_losses(entry.losses, part.losses)
        arrays += _declare(entry.dense, tuple(part.dense.values())) + declare_slices(entry.slices, part.slices)
        arrays += declare_slices(entry.penalties, part.penalties)
    return frames_of(header, arrays, channel)


def push_from_frames(frames: Iterable[bytes], channels: SharedChannels | None = None) -> Push:
    """The push in the frames of one ReportGradient.

    Args:
        frames: As they came.
        channels: Where its arrays may lie; None: nowhere else.

    Raises:
        BadInput: malformed frames, no PushId, a table named twice, or a size or dtype that cannot be.
        Unsupported: its arrays lie in a channel that is not known here.
    """
    reader = FrameReader(frames, "GradientFrame")
    header = reader.header(master_pb2.GradientHeader)
    plan = BodyPlan("GradientFrame")
    _plan_tensors(plan, "dense gradient", header.dense)
    plan_slices(plan, "GradientFrame", header.slices)
    _plan_tensors(plan, "state", header.states)
    _plan_tensors(plan, "metric", header.metrics)
    for part in header.parts:
        _plan_tensors(plan, "dense gradient", part.dense)
        plan_slices(plan, "GradientFrame", part.slices)
        plan_slices(plan, "GradientFrame", part.penalties)
    push_id = _id_from_message(header.push)
    arrays = read_body(reader, header, "GradientFrame", plan, channels)
    return from_message(
        Push,
        header,
        id=push_id,
        dense=tuple(next(arrays) for _ in header.dense),
        slices={entry.table: Slices(next(arrays), next(arrays)) for entry in header.slices},
        states=tuple(next(arrays) for _ in header.states),
        metrics=tuple(next(arrays) for _ in header.metrics),
        losses=_losses(header.losses),
        parts=_parts(header.parts, arrays),
    )


def dense_frames(snapshot: DenseSnapshot | None) -> Iterator[bytes]:
    """The frames of one PullDense.

    Args:
        snapshot: What was pulled; None: the version is not committed yet.
    """
    if snapshot is None:
        return encode(master_pb2.DenseHeader(ready=False).SerializeToString(), ())
    header = master_pb2.DenseHeader(ready=True, version=snapshot.version, trainable=snapshot.trainable)
    arrays = _declare(header.variables, snapshot.variables, snapshot.variable_names)
    arrays += _declare(header.states, snapshot.states, snapshot.state_names)
    return encode(header.SerializeToString(), arrays)


def dense_from_frames(frames: Iterable[bytes]) -> DenseSnapshot | None:
    """The dense variables in the frames of one PullDense; None: not committed yet.

    Raises:
        BadInput: malformed frames.
    """
    reader = FrameReader(frames, "DenseFrame")
    header = reader.header(master_pb2.DenseHeader)
    plan = BodyPlan("DenseFrame")
    _plan_tensors(plan, "variable", header.variables)
    _plan_tensors(plan, "state", header.states)
    arrays = reader.read(plan)
    if not header.ready:
        return None
    count = len(header.variables)
    return DenseSnapshot(
        version=header.version,
        variables=tuple(arrays[:count]),
        states=tuple(arrays[count:]),
        variable_names=tuple(entry.name for entry in header.variables),
        state_names=tuple(entry.name for entry in header.states),
        trainable=header.trainable,
    )


def evaluation_frames(report: EvaluationReport) -> Iterator[bytes]:
    """The frames of one ReportEvaluation."""
    header = to_message(master_pb2.EvaluationHeader, report, metrics=())
    arrays = _declare(header.metrics, report.metrics)
    return encode(header.SerializeToString(), arrays)


def evaluation_from_frames(frames: Iterable[bytes]) -> EvaluationReport:
    """The report in the frames of one ReportEvaluation.

    Raises:
        BadInput: malformed frames.
    """
    reader = FrameReader(frames, "EvaluationFrame")
    header = reader.header(master_pb2.EvaluationHeader)
    plan = BodyPlan("EvaluationFrame")
    _plan_tensors(plan, "metric", header.metrics)
    return from_message(EvaluationReport, header, metrics=tuple(reader.read(plan)))


def _id_to_message(push_id: PushId) -> master_pb2.PushId:
    if isinstance(push_id, SyncPushId):
        return master_pb2.PushId(sync_id=to_message(master_pb2.SyncPushId, push_id))
    return master_pb2.PushId(async_id=to_message(master_pb2.AsyncPushId, push_id))


def _id_from_message(message: master_pb2.PushId) -> PushId:
    if message.HasField("sync_id"):
        return from_message(SyncPushId, message.sync_id)
    if message.HasField("async_id"):
        return from_message(AsyncPushId, message.async_id)
    raise BadInput("GradientFrame: its header has no PushId; set sync_id or async_id, so that it counts once")


def _declare_losses(message: master_pb2.Losses, losses: Mapping[int, float]) -> None:
    message.places.extend(losses)
    message.means.extend(losses.values())


def _losses(message: master_pb2.Losses) -> dict[int, float]:
    return _by_place("metrics", message.places, message.means)


def _by_place(what: str, places: Sequence[int], values: Sequence[T]) -> dict[int, T]:
    if len(places) != len(values) or len(set(places)) < len(places):
        raise BadInput(f"GradientFrame: {len(values)} {what} for the places {list(places)}; name each place once")
    return dict(zip(places, values, strict=True))


def _parts(parts: Iterable[master_pb2.GradientPart], arrays: Iterator[Tensor]) -> tuple[GradientPart, ...]:
    return tuple(
        GradientPart(
            divisor=from_message(Divisor, part.divisor),
            dense=_by_place("gradients", part.places, [next(arrays) for _ in part.dense]),
            slices={entry.table: Slices(next(arrays), next(arrays)) for entry in part.slices},
            losses=_losses(part.losses),
            penalties={entry.table: Slices(next(arrays), next(arrays)) for entry in part.penalties},
        )
        for part in parts
    )


def _declare(
    entries: RepeatedCompositeFieldContainer[master_pb2.TensorEntry],
    tensors: Sequence[Tensor],
    names: Sequence[str] = (),
) -> list[Tensor]:
    """Adds an entry for each tensor; the tensors."""
    for number, tensor in enumerate(tensors):
        if tensor.dtype.name not in _DTYPES:
            raise BadInput(f"tensor {number} has dtype {tensor.dtype}; known dtypes are {', '.join(_DTYPES)}")
        entries.add(name=names[number] if names else "", dtype=tensor.dtype.name, shape=tensor.shape)
    return list(tensors)


def _plan_tensors(plan: BodyPlan, what: str, entries: Iterable[master_pb2.TensorEntry]) -> None:
    for number, entry in enumerate(entries):
        if entry.dtype not in _DTYPES:
            raise BadInput(f"{what} {number} has dtype {entry.dtype!r}; known dtypes are {', '.join(_DTYPES)}")
        plan.add(f"{what} {number}", tuple(entry.shape), _DTYPES[entry.dtype])
