"""The calls about pushes to store servers as messages and frames, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.shards.row_pushes import (
    Measured,
    PushedCommit,
    RowPush,
    RowPushOutcome,
    Slices,
    TableClip,
)
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.messages.frames import BodyPlan, FrameReader, encode
from elastable.embedding_store.wire.pushes.offer_messages import cut_from_message, cut_to_message
from elastable.embedding_store.wire.pushes.pushed_arrays import body_of, declare_slices, plan_slices, read_body
from elastable.embedding_store.wire.pushes.sums_messages import sums_from_message, sums_to_message
from elastable.embedding_store.wire.shared.shared_channel import SharedChannel, SharedChannels

__all__ = [
    "measured_from_message",
    "measured_to_message",
    "pushed_commit_frames",
    "pushed_commit_from_frames",
    "record_frames",
    "record_from_frames",
    "row_outcome_from_message",
    "row_outcome_to_message",
    "row_push_frames",
    "row_push_from_frames",
]

_UINT8 = np.dtype(np.uint8)
_MOST_SQUARES_BYTES = 128
_OUTCOMES = {
    RowPushOutcome.ACCEPTED: store_pb2.RowPushReply.OUTCOME_ACCEPTED,
    RowPushOutcome.DUPLICATE: store_pb2.RowPushReply.OUTCOME_DUPLICATE,
    RowPushOutcome.STALE: store_pb2.RowPushReply.OUTCOME_STALE,
}
_OUTCOMES_BACK = {value: outcome for outcome, value in _OUTCOMES.items()}


def row_push_frames(push: RowPush, channel: SharedChannel | None = None) -> Iterator[bytes]:
    """The frames of one PushRows.

    Args:
        push: What is pushed.
        channel: Where to lay its arrays down, if that is worth it; None: they travel in the frames.

    Raises:
        BadGradient: an array that the wire has no place for; names its table.
    """
    header = store_pb2.RowPushHeader(
        job=push.job, version=push.version, micro_batch=push.micro_batch, sender=push.sender
    )
    arrays: list[Array] = []
    for part in push.parts:
        arrays += declare_slices(header.parts.add().slices, part)
    body = body_of(header, arrays, channel)  # first: the header says where it lies
    return encode(header.SerializeToString(), body)


def row_push_from_frames(frames: Iterable[bytes], channels: SharedChannels | None = None) -> RowPush:
    """The push in the frames of one PushRows.

    Args:
        frames: As they came.
        channels: Where its arrays may lie; None: nowhere else.

    Raises:
        BadInput: malformed frames, a table named twice in a part, or a size that cannot be.
        Unsupported: its arrays lie in a channel that is not known here.
    """
    reader = FrameReader(frames, "RowPush")
    header = reader.header(store_pb2.RowPushHeader)
    plan = BodyPlan("RowPush")
    for part in header.parts:
        plan_slices(plan, "RowPush", part.slices)
    arrays = read_body(reader, header, "RowPush", plan, channels)
    parts = [{entry.table: Slices(next(arrays), next(arrays)) for entry in part.slices} for part in header.parts]
    return RowPush(header.job, header.version, header.micro_batch, tuple(parts), header.sender)


def row_outcome_to_message(outcome: RowPushOutcome) -> store_pb2.RowPushReply:
    """The reply to a PushRows."""
    return store_pb2.RowPushReply(outcome=_OUTCOMES[outcome])


def row_outcome_from_message(reply: store_pb2.RowPushReply) -> RowPushOutcome:
    """The outcome of a PushRows. Raises `BadInput` for one that is not known here."""
    if reply.outcome not in _OUTCOMES_BACK:
        raise BadInput(f"RowPushReply: outcome {reply.outcome} is unknown; start all processes from one release")
    return _OUTCOMES_BACK[reply.outcome]


def measured_to_message(measured: Measured) -> store_pb2.MeasureReply:
    """The reply to a Measure."""
    reply = store_pb2.MeasureReply(not_finite=measured.not_finite, missing=measured.missing)
    for table, squares in measured.squares.items():
        reply.tables.add(table=table, squares=squares.to_bytes((squares.bit_length() + 7) // 8, "little"))
    return reply


def measured_from_message(reply: store_pb2.MeasureReply) -> Measured:
    """The inverse of `measured_to_message`. Raises `BadInput` for a number longer than any sum is."""
    squares = {}
    for entry in reply.tables:
        if len(entry.squares) > _MOST_SQUARES_BYTES:
            raise BadInput(f"MeasureReply: squares of {len(entry.squares)} bytes for table {entry.table!r}")
        squares[entry.table] = int.from_bytes(entry.squares, "little")
    return Measured(squares, tuple(reply.not_finite), tuple(reply.missing))


def pushed_commit_frames(commit: PushedCommit) -> Iterator[bytes]:
    """The frames of one CommitPushed."""
    header = store_pb2.CommitPushedHeader(
        sums=sums_to_message(commit.sums),
        step=commit.step,
        learning_rates=commit.learning_rates,
        ends_chapter=commit.ends_chapter,
        clips={table: store_pb2.TableClip(scale=clip.scale, bound=clip.bound) for table, clip in commit.clips.items()},
        dropped=commit.dropped,
        time=commit.time,
        has_record=commit.record is not None,
        record_bytes=len(commit.record or b""),
        cuts={table: cut_to_message(cut) for table, cut in commit.cuts.items()},
    )
    return encode(header.SerializeToString(), _bytes_of(commit.record))


def pushed_commit_from_frames(frames: Iterable[bytes]) -> PushedCommit:
    """The commit in the frames of one CommitPushed. Raises `BadInput`: malformed frames."""
    reader = FrameReader(frames, "CommitPushed")
    header = reader.header(store_pb2.CommitPushedHeader)
    record = _record(reader, header.has_record, header.record_bytes, "CommitPushed")
    return PushedCommit(
        sums_from_message(header.sums),
        header.step,
        dict(header.learning_rates),
        _clips(header.clips),
        record,
        header.ends_chapter,
        header.dropped,
        header.time if header.HasField("time") else None,
        {table: cut_from_message(cut) for table, cut in header.cuts.items()},
    )


def record_frames(record: bytes | None, version: int = 0) -> Iterator[bytes]:
    """The frames of one ReadRecord, or of one KeepRecord with its version."""
    header = store_pb2.RecordHeader(has_record=record is not None, record_bytes=len(record or b""), version=version)
    return encode(header.SerializeToString(), _bytes_of(record))


def record_from_frames(frames: Iterable[bytes]) -> tuple[bytes | None, int]:
    """The record in the frames of one ReadRecord, and the version. Raises `BadInput`: malformed frames."""
    reader = FrameReader(frames, "Record")
    header = reader.header(store_pb2.RecordHeader)
    return _record(reader, header.has_record, header.record_bytes, "Record"), header.version


def _bytes_of(record: bytes | None) -> list[Array]:
    return [] if not record else [np.frombuffer(record, np.uint8)]


def _record(reader: FrameReader, there: bool, size: int, message: str) -> bytes | None:
    plan = BodyPlan(message)
    plan.add("record", (size,), _UINT8)
    (body,) = reader.read(plan)
    return body.tobytes() if there else None


def _clips(clips: Mapping[str, store_pb2.TableClip]) -> dict[str, TableClip]:
    return {
        table: TableClip(clip.scale, clip.bound if clip.HasField("bound") else None) for table, clip in clips.items()
    }
