"""What a store keeps in its tier besides rows: tables, version, and up to which entry of the log rows are there."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from elastable.embedding_store.contract.arrays import UInt8
from elastable.embedding_store.contract.malformed import MALFORMED
from elastable.embedding_store.contract.row_data import TableState
from elastable.embedding_store.contract.spec import TableSpec, spec_from_json, spec_to_json
from elastable.embedding_store.engine.tiered.tier_records import StoredTouches
from elastable.embedding_store.errors import BadSpec, StoreBroken
from elastable.embedding_store.log.changes import decode_payload, encode_payload


@dataclass(frozen=True, slots=True)
class FlushedTable:
    """What the state of a store says of one table, besides its rows.

    Attributes:
        spec: The table.
        stored: Its name in the tier.
        direct: Whether row i lies at position i.
        state: Its `TableState`.
        steps: `TableSteps.save` of a table whose rows follow steps.
        touched: How to read what records say of touches.
        rows: How many the table has.
    """

    spec: TableSpec
    stored: str
    direct: bool
    state: TableState
    steps: bytes | None
    touched: StoredTouches
    rows: int


T = TypeVar("T")

_UNREADABLE: tuple[type[Exception], ...] = (*MALFORMED, BadSpec, StopIteration)
_FORMAT = 1
_CRC_BYTES = 4


@dataclass(frozen=True, slots=True)
class StoreState:
    """A store as of one entry of its log.

    Attributes:
        version: Of the store.
        sequence: Number of the entry: rows in the tier include it, and maybe later ones.
        record: `Commit.record` of the version.
        tables: Every table.
        complete: Whether the rows in the tier are those of this entry, no later ones. Only asked without a log.
    """

    version: int
    sequence: int
    record: bytes | None
    tables: Sequence[FlushedTable]
    complete: bool = True

    def to_bytes(self) -> bytes:
        """The state with its checksum, which `from_bytes` reads."""
        arrays: list[UInt8] = []

        def kept(content: bytes | UInt8 | None) -> bool:
            if content is not None:
                arrays.append(np.frombuffer(content, np.uint8) if isinstance(content, bytes) else content)
            return content is not None

        record = kept(self.record)
        tables = [
            {
                "spec": spec_to_json(table.spec),
                "stored": table.stored,
                "direct": table.direct,
                "decay": table.state.untouched_decay,
                "settled": table.touched.settled,
                "counted": table.touched.counted,
                "unsettled": table.touched.unsettled,
                "rows": table.rows,
                "counts": kept(table.state.admission_counts),
                "steps": kept(table.steps),
                **({} if table.state.touch_times is None else {"times": kept(table.state.touch_times.tobytes())}),
            }
            for table in self.tables
        ]
        fields = {
            "format": _FORMAT,
            "version": self.version,
            "sequence": self.sequence,
            "complete": self.complete,
            "record": record,
            "tables": tables,
        }
        payload = b"".join(encode_payload(fields, arrays))
        return zlib.crc32(payload).to_bytes(_CRC_BYTES, "little") + bytes(_CRC_BYTES) + payload

    @classmethod
    def from_bytes(cls, content: bytes, place: str) -> "StoreState":
        """Reads what `to_bytes` wrote. Raises `StoreBroken`, which names the place."""
        payload = content[2 * _CRC_BYTES :]
        if zlib.crc32(payload) != int.from_bytes(content[:_CRC_BYTES], "little"):
            raise StoreBroken(f"{place}: the state of the store is corrupt; restore a checkpoint into an empty store")
        try:
            decoded = decode_payload(memoryview(payload))
            fields = decoded.fields
            arrays: Iterator[object] = iter(decoded.arrays)
            if fields["format"] != _FORMAT:
                raise StoreBroken(
                    f"{place}: the store was written by another release (format {fields['format']!r}, not {_FORMAT})"
                )
            record = _taken(fields["record"], arrays)
            return cls(
                _integer(fields["version"]),
                _integer(fields["sequence"]),
                None if record is None else record.tobytes(),
                [_table(table, arrays) for table in _of(list, fields["tables"])],
                _of(bool, fields["complete"]),
            )
        except _UNREADABLE as error:
            raise StoreBroken(f"{place}: the state of the store cannot be read: {error!r}") from error


def _table(fields: object, arrays: Iterator[object]) -> FlushedTable:
    described = _of(dict, fields)
    counts = _taken(described["counts"], arrays)
    steps = _taken(described["steps"], arrays)
    times = _taken(described.get("times", False), arrays)
    decay = described["decay"]
    return FlushedTable(
        spec_from_json(_of(str, described["spec"])),
        _of(str, described["stored"]),
        _of(bool, described["direct"]),
        TableState(
            None if counts is None else counts.copy(),
            None if decay is None else _of(float, decay),
            None if times is None else np.frombuffer(times.tobytes(), np.int64).reshape(-1, 3),
        ),
        None if steps is None else steps.tobytes(),
        StoredTouches(
            [_integer(version) for version in _of(list, described["settled"])],
            _integer(described["counted"]),
            _of(bool, described["unsettled"]),
        ),
        _integer(described["rows"]),
    )


def _taken(there: object, arrays: Iterator[object]) -> UInt8 | None:
    if not _of(bool, there):
        return None
    array = _of(np.ndarray, next(arrays))
    if array.dtype != np.uint8:
        raise TypeError(f"an array of {array.dtype}")
    return array


def _of(kind: type[T], value: object) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r:.100} where {kind.__name__} should be")
    return value


def _integer(value: object) -> int:
    number = _of(int, value)
    if number < 0:
        raise ValueError(f"a negative number: {number}")
    return number
