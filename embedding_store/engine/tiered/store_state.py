"""What a store keeps in its tier besides rows: tables, version, and up to which entry of the log rows are there."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.contract.malformed import MALFORMED
from elastable.embedding_store.contract.row_data import TableState
from elastable.embedding_store.contract.spec import TableSpec, spec_from_json, spec_to_json
from elastable.embedding_store.engine.tiered.tier_records import StoredTouches
from elastable.embedding_store.errors import BadSpec, StoreBroken
from elastable.embedding_store.log.changes import (
    bytes_of,
    decode_payload,
    encode_payload,
    state_fields,
    table_state_of,
    typed,
)


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


_UNREADABLE: tuple[type[Exception], ...] = (*MALFORMED, BadSpec, StopIteration)
_FORMAT = 2
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
        identity: Random text of this store, from its first state on; "": it has none yet.
    """

    version: int
    sequence: int
    record: bytes | None
    tables: Sequence[FlushedTable]
    complete: bool = True
    identity: str = ""

    def to_bytes(self) -> bytes:
        """The state with its checksum, which `from_bytes` reads."""
        arrays: list[Int64 | UInt8] = [] if self.record is None else [np.frombuffer(self.record, np.uint8)]
        tables = []
        for table in self.tables:
            state, parts = state_fields(table.state)
            arrays += parts
            if table.steps is not None:
                arrays.append(np.frombuffer(table.steps, np.uint8))
            described = {
                "spec": spec_to_json(table.spec),
                "stored": table.stored,
                "direct": table.direct,
                "settled": table.touched.settled,
                "counted": table.touched.counted,
                "unsettled": table.touched.unsettled,
                "rows": table.rows,
                "steps": table.steps is not None,
            }
            tables.append({**described, **state})
        fields = {
            "format": _FORMAT,
            "version": self.version,
            "sequence": self.sequence,
            "complete": self.complete,
            "identity": self.identity,
            "record": self.record is not None,
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
            fields, arrays = decode_payload(memoryview(payload))
            if fields["format"] != _FORMAT:
                raise StoreBroken(
                    f"{place}: the store was written by another release (format {fields['format']!r}, not {_FORMAT})"
                )
            return cls(
                _integer(fields["version"]),
                _integer(fields["sequence"]),
                bytes_of(next(arrays)).tobytes() if typed(fields["record"], bool) else None,
                [_table(typed(table, dict), arrays) for table in typed(fields["tables"], list)],
                typed(fields["complete"], bool),
                typed(fields["identity"], str),
            )
        except _UNREADABLE as error:
            raise StoreBroken(f"{place}: the state of the store cannot be read: {error!r}") from error


def _table(fields: Mapping[str, object], arrays: Iterator[object]) -> FlushedTable:
    return FlushedTable(
        spec_from_json(typed(fields["spec"], str)),
        typed(fields["stored"], str),
        typed(fields["direct"], bool),
        table_state_of(fields, arrays),
        bytes_of(next(arrays)).tobytes() if typed(fields["steps"], bool) else None,
        StoredTouches(
            [_integer(version) for version in typed(fields["settled"], list)],
            _integer(fields["counted"]),
            typed(fields["unsettled"], bool),
        ),
        _integer(fields["rows"]),
    )


def _integer(value: object) -> int:
    number = typed(value, int)
    if number < 0:
        raise ValueError(f"a negative number: {number}")
    return number
