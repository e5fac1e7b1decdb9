"""Table specs, commits, blocks of rows and ids as messages and frames, and back."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import Message

from elastable.embedding_store.contract.arrays import Array, Int64
from elastable.embedding_store.contract.row_data import RowBlock, TableState
from elastable.embedding_store.contract.spec import (
    AdmissionSpec,
    EvictionSpec,
    InitializerSpec,
    OptimizerSpec,
    ShardOrigin,
    TableSpec,
)
from elastable.embedding_store.engine.store_history import FollowedChange
from elastable.embedding_store.errors import BadInput, BadSpec
from elastable.embedding_store.support.array_body import BodyPlan
from elastable.embedding_store.tables.checks import array_kind
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.messages.frames import FrameReader, encode, require_wire_ids
from elastable.embedding_store.wire.messages.plain_data import from_message, to_message

LONGEST_WAIT_S = 60.0
"""How long a call may ask the server to wait for a version."""

_INT64 = np.dtype(np.int64)
_FLOAT32 = np.dtype(np.float32)


def optional(message: Message, field: str) -> Any:
    """A field's value; None where it is not set."""
    return getattr(message, field) if message.HasField(field) else None


def wait_seconds(message: str, wait_ms: int, longest_s: float = LONGEST_WAIT_S) -> float:
    """The seconds that a call asks the server to wait. Raises `BadInput` where it may not."""
    if not 0 <= wait_ms <= longest_s * 1000:
        raise BadInput(f"{message}: wait_ms {wait_ms}: wait from 0 to {longest_s * 1000:.0f}, and call again")
    return wait_ms / 1000


def block_frames(table: str, block: RowBlock) -> Iterator[bytes]:
    """The frames of one block of rows.

    Raises:
        BadIds, BadInput: an array that the wire has no place for; names its table.
    """
    require_wire_ids(table, block.ids)
    count = len(block.ids)
    for what, values in (("weights", block.weights), ("slots", block.slots)):
        _require_rows(table, what, values, count, BadInput)
    header = store_pb2.RowBlockHeader(
        table=table, count=count, dim=block.weights.shape[1], slot_width=block.slots.shape[1], trained=block.trained
    )
    arrays: list[Array] = [block.ids, block.weights, block.slots]
    if block.touches is not None:
        if block.touches.dtype != np.int64 or block.touches.shape != (count, 2):
            raise BadInput(f"table {table!r}: touches must be int64 [{count}, 2], got {array_kind(block.touches)}")
        header.touches = True
        arrays.append(block.touches)
    return encode(header.SerializeToString(), arrays)


def blocks_from_frames(frames: Iterable[bytes]) -> Iterator[tuple[str, RowBlock | TableState]]:
    """Blocks, or states, with the tables that they are of, one after the other, until the frames end.

    Raises:
        BadInput: malformed frames, or a size that cannot be.
    """
    frames = iter(frames)
    for first in frames:
        reader = FrameReader(chain((first,), frames), "RowBlock")
        header = reader.header(store_pb2.RowBlockHeader)
        plan = BodyPlan("RowBlock")
        if header.HasField("state"):
            yield header.table, _state(reader, header, plan)
            continue
        plan.add("ids", (header.count,), _INT64)
        plan.add("weights", (header.count, header.dim), _FLOAT32)
        plan.add("slots", (header.count, header.slot_width), _FLOAT32)
        if header.touches:
            plan.add("touches", (header.count, 2), _INT64)
        ids, weights, slots, *touches = reader.read(plan, to_the_end=False)
        yield header.table, RowBlock(ids, weights, slots, touches[0] if touches else None, header.trained)


Kept = TypeVar("Kept", RowBlock, TableState)


def only(kind: type[Kept], frames: Iterable[bytes]) -> Iterator[Kept]:
    """Blocks, or states, of a reply that holds nothing else. Raises as `blocks_from_frames`."""
    for table, found in blocks_from_frames(frames):
        if not isinstance(found, kind):
            raise BadInput(
                f"RowBlock: a {type(found).__name__} of table {table!r} where a {kind.__name__} was asked for"
            )
        yield found


def ids_frames(
    table: str, ids: Int64, pin: bytes = b"", *, block_rows: int = 0, state: bool = False
) -> Iterator[bytes]:
    """The frames of one Delete or ReadRows.

    Args:
        table: Its name.
        ids: int64 `[n]`.
        pin: Token of the pin to read; empty: the store.
        block_rows: Above 0: all rows are read instead, in blocks of so many.
        state: Whether what the table keeps besides its rows is read instead.

    Raises:
        BadIds: ids that the wire has no place for.
    """
    require_wire_ids(table, ids)
    header = store_pb2.RowIdsHeader(table=table, count=len(ids), pin=pin, block_rows=block_rows, state=state)
    return encode(header.SerializeToString(), [ids])


def ids_from_frames(frames: Iterable[bytes]) -> tuple[store_pb2.RowIdsHeader, Int64]:
    """The header and the ids in the frames of one Delete or ReadRows.

    Raises:
        BadInput: malformed frames.
    """
    reader = FrameReader(frames, "RowIds")
    header = reader.header(store_pb2.RowIdsHeader)
    plan = BodyPlan("RowIds")
    plan.add("ids", (header.count,), _INT64)
    (ids,) = reader.read(plan)
    return header, ids


def state_frames(table: str, state: TableState) -> Iterator[bytes]:
    """The frames of what a table keeps next to its rows.

    Raises:
        BadInput: an array that the wire has no place for; names its table.
    """
    header = store_pb2.TableState(untouched_decay=state.untouched_decay)
    counts, times, arrays = state.admission_counts, state.touch_times, list[Array]()
    if counts is not None:
        if not isinstance(counts, np.ndarray) or counts.dtype != np.uint8 or counts.ndim != 1:
            raise BadInput(f"table {table!r}: admission counts must be uint8 [counters], got {array_kind(counts)}")
        header.counters = len(counts)
        arrays.append(counts)
    if times is not None:
        if not isinstance(times, np.ndarray) or times.dtype != np.int64 or times.shape != (len(times), 3):
            raise BadInput(f"table {table!r}: touch times must be int64 [spans, 3], got {array_kind(times)}")
        header.spans = len(times)
        arrays.append(times)
    return encode(store_pb2.RowBlockHeader(table=table, state=header).SerializeToString(), arrays)


def _state(reader: FrameReader, header: store_pb2.RowBlockHeader, plan: BodyPlan) -> TableState:
    """The inverse of `state_frames`, once the header is read."""
    said = header.state
    if header.count or header.dim or header.slot_width or header.touches:
        raise BadInput(f"RowBlock: the state of table {header.table!r} comes with rows; send them after it")
    plan.add("admission counts", (said.counters,), np.dtype(np.uint8))
    plan.add("touch times", (said.spans, 3), _INT64)
    counts, times = reader.read(plan, to_the_end=False)
    decay = optional(said, "untouched_decay")
    return TableState(counts if len(counts) else None, decay, times if said.HasField("spans") else None)


def _require_rows(table: str, what: str, values: object, count: int, error: type[BadInput]) -> None:
    if not isinstance(values, np.ndarray) or values.dtype != np.float32 or values.ndim != 2 or len(values) != count:
        raise error(f"table {table!r}: {what} must be float32 [{count}, columns], got {array_kind(values)}")


# What a version is said to be, and the record that a store server keeps of it


def record_frames(
    record: bytes | None, version: int | None = None, *, force: bool = False, take_back: bool = False
) -> Iterator[bytes]:
    """The frames of one ReadRecord, or of one ResetVersion."""
    return with_record(store_pb2.RecordHeader(version=version, force=force, take_back=take_back), record)


def record_from_frames(frames: Iterable[bytes]) -> bytes | None:
    """The record in the frames of one ReadRecord. Raises `BadInput`: malformed frames."""
    return and_record(frames, "Record", store_pb2.RecordHeader)[1]


def reset_from_frames(frames: Iterable[bytes]) -> tuple[store_pb2.RecordHeader, bytes | None]:
    """What a ResetVersion says, and its record. Raises `BadInput`: malformed frames, or fields that do not fit."""
    header, record = and_record(frames, "ResetVersion", store_pb2.RecordHeader)
    if not (header.take_back or header.HasField("version")):
        raise BadInput("ResetVersion: no version: say which one the rows are of")
    if header.take_back and (header.force or record is not None):
        raise BadInput("ResetVersion: a version that is taken back has its own record, and leaves pins alone")
    return header, record


def followed_frames(change: FollowedChange) -> Iterator[bytes]:
    """The frames of one change, for those who follow a store."""
    body, back = change.payload or b"", change.payload is None
    header = store_pb2.FollowHeader(version=change.version, bytes=len(body), begin=change.begin, taken_back=back)
    return encode(header.SerializeToString(), [np.frombuffer(body, np.uint8)] if body else [])


def followed_from_frames(frames: Iterable[bytes]) -> Iterator[FollowedChange]:
    """The changes in the frames of one Follow, until these end. Raises `BadInput`: malformed frames."""
    frames = iter(frames)
    for first in frames:
        reader = FrameReader(chain((first,), frames), "Followed")
        header, plan = reader.header(store_pb2.FollowHeader), BodyPlan("Followed")
        plan.add("change", (header.bytes,), np.dtype(np.uint8))
        (body,) = reader.read(plan, to_the_end=False)
        yield FollowedChange(header.version, None if header.taken_back else body.tobytes(), header.begin)


WithRecord = TypeVar("WithRecord", store_pb2.CommitPushedHeader, store_pb2.RecordHeader)


def with_record(header: WithRecord, record: bytes | None) -> Iterator[bytes]:
    """Frames of a header that says how long the record behind it is."""
    header.has_record, header.record_bytes = record is not None, len(record or b"")
    return encode(header.SerializeToString(), [np.frombuffer(record, np.uint8)] if record else [])


def and_record(frames: Iterable[bytes], message: str, kind: type[WithRecord]) -> tuple[WithRecord, bytes | None]:
    """The inverse of `with_record`. Raises `BadInput`: malformed frames of that message."""
    reader = FrameReader(frames, message)
    header, plan = reader.header(kind), BodyPlan(message)
    plan.add("record", (header.record_bytes,), np.dtype(np.uint8))
    (body,) = reader.read(plan)
    return header, body.tobytes() if header.has_record else None


# Table specs as protobuf messages, and back


STORE_SERVICE: str = store_pb2.DESCRIPTOR.services_by_name["Store"].full_name
"""Full name of the service on the wire."""


def spec_to_message(spec: TableSpec) -> store_pb2.TableSpec:
    """The message that says what `spec` says."""
    optimizer = to_message(
        store_pb2.Optimizer,
        spec.optimizer,
        hyperparameters=dict(spec.optimizer.hyperparameters),
        dense=not spec.optimizer.lazy,
    )
    return to_message(
        store_pb2.TableSpec,
        spec,
        optimizer=optimizer,
        ids="" if spec.ids == "int64" else spec.ids,
        origin=None if spec.origin == ShardOrigin() else _origin_to_message(spec.origin),
    )


def spec_from_message(message: store_pb2.TableSpec) -> TableSpec:
    """The spec that a message says; what it leaves out takes the spec's defaults.

    Raises:
        BadSpec: no table can be so.
    """
    default = TableSpec(name="default", dim=1)
    eviction, admission = message.eviction, message.admission
    return from_message(
        TableSpec,
        message,
        dtype=message.dtype or default.dtype,
        initializer=from_message(InitializerSpec, message.initializer)
        if message.HasField("initializer")
        else default.initializer,
        optimizer=_optimizer(message) if message.HasField("optimizer") else default.optimizer,
        admission=AdmissionSpec(admission.sightings, admission.counters or AdmissionSpec(1).counters)
        if message.HasField("admission")
        else None,
        eviction=from_message(EvictionSpec, eviction, every=eviction.every or 1)
        if message.HasField("eviction")
        else None,
        ids=message.ids or default.ids,
        origin=_origin(message.origin) if message.HasField("origin") else default.origin,
    )


def _optimizer(message: store_pb2.TableSpec) -> OptimizerSpec:
    optimizer = message.optimizer
    if not optimizer.name:
        raise BadSpec(f'table {message.name!r}: its optimizer has no name; use "sgd", "adagrad", "adam", ...')
    pairs = tuple(sorted(optimizer.hyperparameters.items()))
    return OptimizerSpec(optimizer.name, pairs, optimizer.keras_config, lazy=not optimizer.dense)


def _origin_to_message(origin: ShardOrigin) -> store_pb2.ShardOrigin:
    return to_message(
        store_pb2.ShardOrigin, origin, table=None if origin.table is None else spec_to_message(origin.table)
    )


def _origin(message: store_pb2.ShardOrigin) -> ShardOrigin:
    table = spec_from_message(message.table) if message.HasField("table") else None
    return from_message(ShardOrigin, message, id_stride=message.id_stride or 1, table=table, shards=message.shards or 1)
