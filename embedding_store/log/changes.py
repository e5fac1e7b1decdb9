"""The changes of a store as entries of its log: what each holds, as bytes and back."""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Array, Float32, Int64, UInt8
from elastable.embedding_store.contract.malformed import MALFORMED
from elastable.embedding_store.contract.row_data import RowBlock, TableState
from elastable.embedding_store.contract.spec import TableSpec, spec_from_json, spec_to_json
from elastable.embedding_store.errors import StoreBroken
from elastable.embedding_store.log.contract import Buffer
from elastable.embedding_store.log.framing import MAX_PAYLOAD_BYTES
from elastable.embedding_store.support.array_body import BodyPlan, raw

_UNREADABLE: tuple[type[Exception], ...] = (*MALFORMED, StopIteration)  # StopIteration: an array is missing
_Number = TypeVar("_Number", np.int64, np.float32, np.uint8)
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class TableImages:
    """What a commit has made of one table's rows.

    Attributes:
        table: Its name.
        ids: int64 `[n]`, each once: rows that were updated and are still there.
        weights: float32 `[n, dim]`, after the update.
        slots: float32 `[n, slot_width]`, likewise.
        touches: int64 `[n, 2]`, `RowBlock.touches` of a table with eviction.
        counted: int64 `[m]`: ids that the table's admission has counted once more.
        removed: int64 `[k]`: ids whose rows were evicted.
        rows: How many the table has after the commit.
    """

    table: str
    ids: Int64
    weights: Float32
    slots: Float32
    touches: Int64 | None
    counted: Int64
    removed: Int64
    rows: int


@dataclass(frozen=True, slots=True)
class CommitImages:
    """A commit, by what it has made of rows. `step`, `frozen`, `ends_replay_epoch` and `record` are those of `Commit`.

    Attributes:
        tables: Of every table of which a row, or a count, has changed.
        rates: Table name -> learning rate of this step, of tables whose rows change without a gradient, too.
        time: Of `Commit`, as it was decided; None where rows of no table go with time.
    """

    step: int
    tables: Sequence[TableImages]
    rates: Mapping[str, float] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    ends_replay_epoch: bool = False
    record: bytes | None = None
    time: float | None = None


@dataclass(frozen=True, slots=True)
class CreateTable:
    """A table that was created."""

    spec: TableSpec


@dataclass(frozen=True, slots=True)
class DropTable:
    """A table that was dropped."""

    table: str


@dataclass(frozen=True, slots=True)
class ClearTable:
    """A table whose rows were forgotten."""

    table: str


@dataclass(frozen=True, slots=True)
class PutRows:
    """Rows that were written as they are."""

    table: str
    block: RowBlock


@dataclass(frozen=True, slots=True)
class DeleteRows:
    """Rows that were taken away: ids int64 `[n]`."""

    table: str
    ids: Int64


@dataclass(frozen=True, slots=True)
class PutTableState:
    """What a table keeps next to its rows, restored as it is."""

    table: str
    state: TableState


@dataclass(frozen=True, slots=True)
class ResetVersion:
    """The rows were declared to be those of the entry's version, with this `Commit.record`."""

    record: bytes | None = None


Change = CommitImages | CreateTable | DropTable | ClearTable | PutRows | DeleteRows | PutTableState | ResetVersion
"""One entry of a store's log."""


def encode_change(change: Change) -> list[Buffer]:
    """The payload of the change's entry."""
    match change:
        case CommitImages():
            return _encode_commit(change)
        case CreateTable(spec):
            return encode_payload({"kind": "create", "spec": spec_to_json(spec)}, [])
        case DropTable(table):
            return encode_payload({"kind": "drop", "table": table}, [])
        case ClearTable(table):
            return encode_payload({"kind": "clear", "table": table}, [])
        case PutRows(table, block):
            touches = [] if block.touches is None else [block.touches]
            return encode_payload({"kind": "put", "table": table}, [block.ids, block.weights, block.slots, *touches])
        case DeleteRows(table, ids):
            return encode_payload({"kind": "delete", "table": table}, [ids])
        case PutTableState(table, state):
            fields, arrays = state_fields(state)
            return encode_payload({"kind": "state", "table": table, **fields}, arrays)
        case ResetVersion(record):
            return encode_payload({"kind": "reset"}, [] if record is None else [np.frombuffer(record, np.uint8)])


def decode_change(payload: memoryview) -> Change:
    """The inverse of `encode_change`. Arrays are views of the payload.

    Raises:
        StoreBroken: the payload is no change.
    """
    fields, arrays = decode_payload(payload)
    try:
        return _decoded(fields, arrays)
    except _UNREADABLE as error:
        raise StoreBroken(f"a log entry of {len(payload):,} bytes is no change of a store: {error}") from error


def _encode_commit(commit: CommitImages) -> list[Buffer]:
    arrays: list[Int64 | Float32 | UInt8] = []
    for images in commit.tables:
        arrays += [images.ids, images.weights, images.slots, images.counted, images.removed]
        arrays += [] if images.touches is None else [images.touches]
    if commit.record is not None:
        arrays.append(np.frombuffer(commit.record, np.uint8))
    fields = {
        "kind": "commit",
        "step": commit.step,
        "tables": [[images.table, images.touches is not None, images.rows] for images in commit.tables],
        "rates": dict(commit.rates),
        "frozen": list(commit.frozen),
        "ends_replay_epoch": commit.ends_replay_epoch,
        "record": commit.record is not None,
        **({} if commit.time is None else {"time": commit.time}),
    }
    return encode_payload(fields, arrays)


def state_fields(state: TableState) -> tuple[dict[str, object], list[Int64 | UInt8]]:
    """A `TableState` as fields and arrays of a payload; `table_state_of` reads them."""
    counts, times = state.admission_counts, state.touch_times
    fields: dict[str, object] = {
        "decay": state.untouched_decay,
        "counts": counts is not None,
        "times": times is not None,
    }
    return fields, [part for part in (counts, times) if part is not None]


def table_state_of(fields: Mapping[str, object], arrays: Iterator[object]) -> TableState:
    """The inverse of `state_fields`; takes what it needs of the arrays. Raises `KeyError`, `TypeError`."""
    decay = fields["decay"]
    counts = bytes_of(next(arrays)).copy() if typed(fields["counts"], bool) else None
    times = _array(next(arrays), np.int64, 2) if typed(fields["times"], bool) else None
    return TableState(counts, None if decay is None else typed(decay, float), times)


def _decoded(fields: Mapping[str, object], arrays: Iterator[object]) -> Change:
    kind = fields["kind"]
    if kind == "commit":
        change: Change = _decoded_commit(fields, arrays)
    elif kind == "create":
        change = CreateTable(spec_from_json(typed(fields["spec"], str)))
    elif kind == "drop":
        change = DropTable(typed(fields["table"], str))
    elif kind == "clear":
        change = ClearTable(typed(fields["table"], str))
    elif kind == "put":
        ids, weights, slots = _ids(next(arrays)), _matrix(next(arrays)), _matrix(next(arrays))
        block = RowBlock(ids, weights, slots, _touches(next(arrays, None)), trained=True)
        change = PutRows(typed(fields["table"], str), block)
    elif kind == "delete":
        change = DeleteRows(typed(fields["table"], str), _ids(next(arrays)))
    elif kind == "state":
        change = PutTableState(typed(fields["table"], str), table_state_of(fields, arrays))
    elif kind == "reset":
        record = next(arrays, None)
        change = ResetVersion(None if record is None else bytes_of(record).tobytes())
    else:
        raise ValueError(f"kind {kind!r} is unknown")
    if left := sum(1 for _ in arrays):
        raise ValueError(f"{left} arrays are left over")
    return change


def _decoded_commit(fields: Mapping[str, object], arrays: Iterator[object]) -> CommitImages:
    images, time = [], fields.get("time")
    for table, has_touches, count in typed(fields["tables"], list):
        ids, weights, slots, counted, removed = islice(arrays, 5)
        touches = _touches(next(arrays)) if has_touches else None
        rows = _ids(ids), _matrix(weights), _matrix(slots), touches
        if typed(count, int) < 0:
            raise TypeError(f"table {table!r} cannot have {count!r} rows")
        images.append(TableImages(typed(table, str), *rows, _ids(counted), _ids(removed), count))
    return CommitImages(
        typed(fields["step"], int),
        images,
        {typed(table, str): float(rate) for table, rate in typed(fields["rates"], dict).items()},
        tuple(typed(name, str) for name in typed(fields["frozen"], list)),
        typed(fields["ends_replay_epoch"], bool),
        bytes_of(next(arrays)).tobytes() if typed(fields["record"], bool) else None,
        None if time is None else typed(time, float),
    )


def typed(value: object, kind: type[_Value]) -> _Value:
    """A value of a payload. Raises `TypeError` where it is of another kind."""
    if not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__} where {kind.__name__} should be")
    return value


def _ids(array: object) -> Int64:
    return _array(array, np.int64, 1)


def _matrix(array: object) -> Float32:
    return _array(array, np.float32, 2)


def bytes_of(array: object) -> UInt8:
    """An array of bytes in a payload. Raises `TypeError` where it is another one."""
    return _array(array, np.uint8, 1)


def _touches(array: object) -> Int64 | None:
    return None if array is None else _array(array, np.int64, 2)


def _array(array: object, dtype: type[_Number], dims: int) -> npt.NDArray[_Number]:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != dims:
        raise TypeError(f"an array is not {np.dtype(dtype)} of {dims} dimensions")
    return array


# A payload of named fields and arrays, without a copy of the arrays


_LENGTHS = struct.Struct("<II")
_DTYPES: dict[str, type[np.int64] | type[np.float32] | type[np.uint8]] = {
    "<i8": np.int64,
    "<f4": np.float32,
    "|u1": np.uint8,
}
_MAX_FIELD_BYTES = 64 << 20
_ALIGN = 8
_UNREADABLE_ARRAYS: tuple[type[Exception], ...] = (*MALFORMED, struct.error)
_Array = npt.NDArray[np.int64] | npt.NDArray[np.float32] | npt.NDArray[np.uint8]


def encode_payload(fields: Mapping[str, object], arrays: Sequence[_Array]) -> list[Buffer]:
    """The pieces of a payload; those of contiguous arrays are the arrays' own memory."""
    listed = [[array.dtype.str, list(array.shape)] for array in arrays]
    text = json.dumps({**fields, "arrays": listed}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    pieces: list[Buffer] = [_LENGTHS.pack(len(text), 0), text]
    for array in arrays:
        if array.size:
            pieces.append(raw(array))
        if array.nbytes % _ALIGN:
            pieces.append(bytes(-array.nbytes % _ALIGN))
    return pieces


def decode_payload(payload: memoryview) -> tuple[Mapping[str, object], Iterator[Array]]:
    """The inverse of `encode_payload`: fields, and arrays that are views of the payload.

    Raises:
        StoreBroken: the payload is not one.
    """
    try:
        length, zero = _LENGTHS.unpack_from(payload)
        if zero or length > min(_MAX_FIELD_BYTES, len(payload) - _LENGTHS.size):
            raise ValueError(f"{length} bytes of fields")
        fields = json.loads(bytes(payload[_LENGTHS.size : _LENGTHS.size + length]))
        plan, body = BodyPlan("it", MAX_PAYLOAD_BYTES, _ALIGN), payload[_LENGTHS.size + length :]
        for dtype, shape in fields.pop("arrays"):
            plan.add("an array", tuple(shape), np.dtype(_DTYPES[dtype]))
        if plan.size > len(body):
            raise ValueError(f"its arrays end {plan.size - len(body)} bytes behind it")
        if plan.size < len(body):
            raise ValueError(f"{len(body) - plan.size} bytes are left over")
        return fields, iter(plan.cut(body, copy=False))
    except _UNREADABLE_ARRAYS as error:
        raise StoreBroken(f"a log entry of {len(payload):,} bytes cannot be read: {error}") from error
