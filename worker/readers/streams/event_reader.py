"""The base of readers of events: columns of what a stream gives, one record an event; bad events are passed over."""

import json
import struct
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cache
from itertools import repeat
from typing import Any, Self, cast

import numpy as np
import pyarrow as pa
import pyarrow.json as pa_json
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import BadInput
from elastable.master.api import MOST_BAD_EVENTS, BadEvent, EventSource, Span
from elastable.worker.readers.batch.pytrees import batch_arrays, gathered, map_arrays
from elastable.worker.readers.batch.ragged import Leaf, RaggedArray, taken
from elastable.worker.readers.batch.reader import Batch, ModelInputs, Reader, checked_indices
from elastable.worker.readers.formats.arrow_columns import At, Column, ColumnChoice, to_array

Decode = Callable[[bytes], Mapping[str, Any]]
"""The payload of an event -> column -> value: a number, a text, or a list of these. Raises anything for a bad event."""

_LONGEST_REASON = 200  # characters
_LOOKED_AT = 100  # events that are tried for the first that can be read


def _of_json(payload: bytes) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", json.loads(payload))


def _of_arrow(payload: bytes) -> Mapping[str, Any]:
    """An IPC stream of one record."""
    for message in pa.ipc.MessageReader.open_stream(payload):
        _refuse_compressed(message)
    with pa.ipc.open_stream(payload) as stream:
        table = stream.read_all()
    table.validate(full=True)  # its lengths and offsets may lead out of its memory
    if table.num_rows != 1:
        raise ValueError(f"{table.num_rows} records; an event holds one")
    return cast("Mapping[str, Any]", table.to_pylist()[0])


_BATCH, _DICTIONARY = "record batch", "dictionary"


def _refuse_compressed(message: pa.ipc.Message) -> None:
    """Before it is read: a thousand bytes of it may unpack to gigabytes. Arrow's own reader does not bound that.

    The metadata is the flatbuffer `Message` of Arrow's Message.fbs, whose header is a `RecordBatch`, or a
    `DictionaryBatch` that holds one as `data`.
    """
    if message.type not in (_BATCH, _DICTIONARY):
        return
    data = message.metadata.to_pybytes()

    def field(table: int, number: int) -> int:
        """Where a field of the table at a position lies; 0: it is not there."""
        vtable = table - _number("<i", data, table)
        slot = 4 + 2 * number
        offset = _number("<H", data, vtable + slot) if slot < _number("<H", data, vtable) else 0
        return table + offset if offset else 0

    def behind(position: int) -> int:
        """The table that a reference at a position points to."""
        return position + _number("<I", data, position)

    batch = behind(field(behind(0), 2))
    if message.type == _DICTIONARY:
        batch = behind(field(batch, 1))
    if field(batch, 3):
        raise ValueError("its record is compressed, and could unpack to any size: write it without (IpcWriteOptions)")


def _number(kind: str, data: bytes, position: int) -> int:
    if position < 0:
        raise ValueError("malformed metadata")
    return int(struct.unpack_from(kind, data, position)[0])


@cache
def _example() -> Any:
    """A message as `tf.train.Example` is on the wire; TensorFlow is not imported for it."""
    parts = {
        "Texts": "1 value REPEATED BYTES", "Floats": "1 value REPEATED FLOAT", "Ints": "1 value REPEATED INT64",
        "Feature": "1 texts OPTIONAL Texts,2 floats OPTIONAL Floats,3 ints OPTIONAL Ints",
        "Named": "1 name OPTIONAL STRING,2 feature OPTIONAL Feature", "Features": "1 feature REPEATED Named",
        "Example": "1 features OPTIONAL Features",
    }  # fmt: skip
    file = descriptor_pb2.FileDescriptorProto(name="example.proto")
    for name, fields in parts.items():
        message = file.message_type.add(name=name)
        for number, field, label, kind in (each.split() for each in fields.split(",")):
            made = message.field.add(name=field, number=int(number), label=f"LABEL_{label}")
            if kind in parts:
                made.type_name = f".{kind}"
            else:
                made.type = descriptor_pb2.FieldDescriptorProto.Type.Value(f"TYPE_{kind}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Example"))


def _of_example(payload: bytes) -> Mapping[str, Any]:
    """Feature -> its values, a list."""
    found = {}
    for named in _example().FromString(payload).features.feature:
        values = [value for _, each in named.feature.ListFields()[:1] for value in each.value]
        found[named.name] = [value.decode() if isinstance(value, bytes) else value for value in values]
    return found


_FORMATS: Mapping[str, Decode] = {"json": _of_json, "arrow": _of_arrow, "example": _of_example}


class EventReader(Reader, EventSource):
    """Events of a stream that goes on, for training: each is trained once, in an order that positions decide.

    A master asks it for what waits, and workers read spans. It is as long as its sample, which says what its records
    are like.

    Attributes:
        steps_per_epoch: Versions in an epoch.

    Raises:
        BadInput: options that cannot be.
    """

    in_order = True
    streams = True
    look_s = 0.05

    def __init__(self, name: str, steps_per_epoch: int) -> None:
        if isinstance(steps_per_epoch, bool) or not isinstance(steps_per_epoch, int) or steps_per_epoch < 1:
            raise BadInput(f"{name}: steps_per_epoch={steps_per_epoch!r}: give a number of versions, at least 1")
        self.steps_per_epoch, self._name = steps_per_epoch, name

    def __len__(self) -> int:
        return 1

    def identity(self) -> str:
        """Nothing."""
        return ""

    def committed(self, positions: Mapping[str, str]) -> None:
        """Nothing."""

    @abstractmethod
    def read(self, spans: Sequence[Span]) -> tuple[Batch | None, tuple[BadEvent, ...]]:
        """The records of events that can be read, in the order of the spans, and the bad events among them.

        They are the same each time.

        Returns:
            The records; None: there are none.

        Raises:
            Unavailable: the stream is away.
            BadInput: events are gone, or more than `MOST_BAD_EVENTS` of them are bad.
        """

    def empty(self) -> BadInput:
        """The error of a stream without a sample."""
        return BadInput(
            f"{self._name}: no event is there yet; its columns are learned from the first one: start when it is there"
        )


class PayloadReader(EventReader):
    """Events that are bytes, each an object of columns.

    Values have the type that the model's input of their name wants, and without one that of the first event, or of
    `column_types`; the first event also says which columns hold lists. An event that does not fit is a bad event: it is
    passed over, noted and counted.

    Args:
        events: How an event is read: "json" (an object), "arrow" (an IPC stream of one record), "example" (a
            `tf.train.Example`; a feature with one value is that value, unless its input is of `[n]`, or that of the
            first event has several), or a function, payload -> dict of column -> value.
        features: Columns that make up x; None: the inputs of the model, or all but label and weight of the first event.
        label, weight, column_types, fill_null, fill_null_list: As of `et.ParquetReader`; targets are floats unless
            `column_types` names another type.
        name: What errors call the stream.

    Raises:
        BadInput: options that cannot be.
    """

    def __init__(
        self,
        name: str,
        steps_per_epoch: int,
        events: str | Decode,
        features: Sequence[str] | None = None,
        label: str | None = None,
        weight: str | None = None,
        column_types: Mapping[str, str] | None = None,
        fill_null: Mapping[str, object] | None = None,
        fill_null_list: Mapping[str, Sequence[object]] | None = None,
    ) -> None:
        super().__init__(name, steps_per_epoch)
        if not callable(events) and events not in _FORMATS:
            raise BadInput(f"{name}: events={events!r}: write {', '.join(map(repr, _FORMATS))}, or give a function")
        self._decode: Decode = events if callable(events) else _FORMATS[events]
        self._choice = ColumnChoice(features, label, weight, column_types, fill_null, fill_null_list)
        self._inputs, self._columns = ModelInputs(), dict[str, tuple[pa.DataType, Column]]()
        self._first, self._first_at = dict[str, Any](), ""
        self._sample: Batch = ()

    @abstractmethod
    def events(self, span: Span) -> Sequence[Any]:
        """The events of a span, as the stream gives them, the same each time. Raises as `read`."""

    @abstractmethod
    def position(self, event: Any) -> str:
        """Where an event is."""

    @abstractmethod
    def payload(self, event: Any) -> bytes:
        """What it says. Raises `BadInput` where it says nothing."""

    def payloads(self, events: Sequence[Any]) -> Sequence[bytes]:
        """What each of them says. Raises as `payload`."""
        return list(map(self.payload, events))

    def take(self, indices: Int64) -> Batch:
        """The sample."""
        rows = checked_indices(indices, 1, self._name)
        self._learn()
        return tuple(map_arrays(lambda leaf: taken(leaf, rows), part) for part in self._sample)

    def for_inputs(self, inputs: ModelInputs) -> Self:
        if inputs == self._inputs:
            return self
        other = copy(self)
        other._inputs, other._columns, other._first = inputs, {}, {}
        return other

    def read(self, spans: Sequence[Span]) -> tuple[Batch | None, tuple[BadEvent, ...]]:
        self._learn()
        found = [(span.partition, self.events(span)) for span in spans]
        if self._decode is _of_json and (parsed := self._parsed([each for _, events in found for each in events])):
            return parsed, ()
        records, bad = list[tuple[str, str, Mapping[str, Any]]](), list[BadEvent]()

        def passed_over(partition: str, position: str, error: Exception) -> None:
            kind = "" if isinstance(error, BadInput) else f"{type(error).__name__}: "
            bad.append(BadEvent(partition, position, f"{kind}{error}"[:_LONGEST_REASON]))

        for partition, event in ((partition, event) for partition, events in found for event in events):
            try:
                records.append((partition, self.position(event), self._record(event)))
            except Exception as error:  # noqa: BLE001 - a function of the user's
                passed_over(partition, self.position(event), error)
        batch = None
        try:
            batch = self._batch([record for _, _, record in records]) if records else None
        except BadInput:
            fitting: list[Batch] = []
            for partition, position, record in records:  # one at a time: which do not fit?
                try:
                    fitting.append(self._batch([record]))
                except BadInput as error:
                    passed_over(partition, position, error)
            every = np.arange(len(fitting), dtype=np.int64)
            batch = cast("Batch", gathered(every, np.zeros_like(every), fitting.__getitem__)) if fitting else None
        if len(bad) > MOST_BAD_EVENTS:
            raise BadInput(
                f"{self._name}: {len(bad)} events of one micro-batch cannot be read, such as {bad[0].partition} "
                f"{bad[0].position}: {bad[0].reason}"
            )
        return batch, tuple(bad)

    def _parsed(self, events: Sequence[Any]) -> Batch | None:
        """All events at once, by Arrow, where nothing about any of them is unusual; None: look at each."""
        kinds = {name: first if column.named else column.kind for name, (first, column) in self._columns.items()}
        try:
            lines = list(map(bytes.strip, self.payloads(events)))
            begun, ended = map(bytes.startswith, lines, repeat(b"{")), map(bytes.endswith, lines, repeat(b"}"))
            if not (lines and all(begun) and all(ended)):
                return None  # so each is at least one row, and as many rows as events are one each
            text = b"\n".join(lines)
            table = pa_json.read_json(
                pa.BufferReader(text),
                pa_json.ReadOptions(use_threads=False, block_size=len(text) + 1),
                pa_json.ParseOptions(pa.schema(kinds), unexpected_field_behavior="ignore"),
            )
            if table.num_rows != len(lines) or any(column.null_count for column in table.columns):
                return None
            return self._arranged(dict(zip(table.column_names, table.columns, strict=True)))
        except (BadInput, pa.ArrowException, OverflowError):
            return None

    def _record(self, event: Any) -> Mapping[str, Any]:
        found = self._decode(self.payload(event))
        if not isinstance(found, Mapping):
            raise BadInput(f"a {type(found).__name__}, and no object of columns")
        if self._decode is _of_example:
            found = {name: self._value(name, values) for name, values in found.items()}
        if missing := [name for name in self._columns if name not in found]:
            raise BadInput(f"no column {missing[0]!r}; its columns are {', '.join(map(repr, list(found)[:20]))}")
        return found

    def _value(self, name: str, values: Sequence[object]) -> object:
        known = self._columns.get(name)
        several = name in self._inputs.lengths if known is None else pa.types.is_list(known[0])
        return values if several or len(values) != 1 else values[0]

    def _batch(self, records: Sequence[Mapping[str, Any]]) -> Batch:
        values: dict[str, pa.Array] = {}
        for name, (first, column) in self._columns.items():
            given = [record[name] for record in records]
            try:
                if pa.types.is_floating(column.kind) and not column.named:
                    given = [float(value) if type(value) is int else value for value in given]
                values[name] = pa.array(given)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise BadInput(f"column {name!r}: {error}") from error
            if not _alike(values[name].type, first):
                raise BadInput(f"column {name!r} is {values[name].type}, and {first} in the first event")
        return self._arranged(values)

    def _arranged(self, values: Mapping[str, pa.Array | pa.ChunkedArray]) -> Batch:
        arrays: dict[str, Leaf] = {}
        for name, (_, column) in self._columns.items():
            with np.errstate(over="ignore"):
                leaf = arrays[name] = to_array(values[name], column, At(name, lambda record: "the event"))
            while isinstance(leaf, RaggedArray):
                leaf = leaf.values
            if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
                # Of one event the gradient would be, and the job would stop there, again and again.
                raise BadInput(
                    f"column {name!r}: null, NaN or Inf; fill_null={{{name!r}: value}} replaces null and NaN"
                )
        features = {name: arrays[name] for name in self._features()}
        return batch_arrays((features, *(arrays[name] for name in self._choice.targets)))

    def _features(self) -> list[str]:
        choice, wanted = self._choice, self._inputs.dtypes
        if choice.features is not None:
            return list(choice.features)
        if wanted and not self._inputs.own_step:
            return list(wanted)
        return [name for name in self._first if name not in choice.targets]

    def _learn(self) -> None:
        """Learns the columns from the first event, once."""
        if self._columns:
            return
        if not self._first:
            found, self._first_at = self._first_event()
            self._first = dict(found)
        first = self._first
        names = dict.fromkeys([*self._features(), *self._choice.targets])
        if missing := [name for name in names if name not in first]:
            raise self._other_schema(
                f"no column {missing[0]!r}; its columns are {', '.join(map(repr, list(first)[:20]))}"
            )
        try:
            types = {name: pa.array([first[name]]).type for name in names}
            self._columns = {name: (kind, self._column(name, kind)) for name, kind in types.items()}
            self._sample = self._batch([first])
        except (BadInput, pa.ArrowException) as error:
            self._columns = {}
            raise self._other_schema(str(error)) from error

    def _other_schema(self, why: str) -> BadInput:
        return BadInput(
            f"{self._name}: the first event, {self._first_at}, says what columns are like, and does not fit: {why}; "
            "take it out of the stream, or read it otherwise (column_types=, fill_null=, a function as events=)"
        )

    def _column(self, name: str, found: pa.DataType) -> Column:
        if name in self._choice.targets and name not in self._choice.column_types and pa.types.is_integer(found):
            found = pa.float64()  # the next one may have a fraction
        return self._choice.column(name, [(self._name, found)], self._inputs, wide=False)

    def _first_event(self) -> tuple[Mapping[str, Any], str]:
        """The first event that can be read, and where it is."""
        last: Exception | None = None
        for partition, waiting in sorted(self.ahead({}, _LOOKED_AT, None).items()):
            if not waiting.stops:
                continue
            for event in self.events(Span(partition, waiting.start, waiting.stops[-1], len(waiting.stops))):
                try:
                    return self._record(event), f"{partition} {self.position(event)}"
                except Exception as error:  # noqa: BLE001 - as in read
                    last = error
        if last is not None:
            raise BadInput(f"{self._name}: none of its first events can be read as said by events=: {last}") from last
        raise self.empty()


def _alike(kind: pa.DataType, first: pa.DataType) -> bool:
    """Whether both are lists as deep, of text or of something else; nulls and empty lists are like anything."""
    while pa.types.is_list(kind) and pa.types.is_list(first):
        kind, first = kind.value_type, first.value_type
    if pa.types.is_null(kind) or pa.types.is_null(first):
        return True
    return all(test(kind) == test(first) for test in (pa.types.is_list, pa.types.is_string, pa.types.is_binary))
