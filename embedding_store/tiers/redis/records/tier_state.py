"""What a tier in Redis keeps beside records: the engine's state, and the stamps confirmed when it was written."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.malformed import MALFORMED
from elastable.embedding_store.errors import BadInput, StoreBroken
from elastable.embedding_store.tiers.redis.connections.reply_shapes import Command
from elastable.embedding_store.tiers.redis.records.record_tables import RecordTable

__all__ = ["SEQUENCE", "TierState", "sequence_of"]

SEQUENCE = b"sequence"

_STATE, _CHECK = b"state", b"check"
_STAMPS, _LOST = b"stamps:", b"lost:"
_MOST_STATE_BYTES = 512 << 20  # of one value, in Redis


@dataclass(frozen=True, slots=True)
class TierState:
    """The state hash, as it was read.

    Attributes:
        exists: Whether there is one; it is from the creation of the first table on.
        state: Of the engine; None: none was ever put.
        check: CRC-32 of it.
        sequence: The greatest stamp that it knows of.
        stamps: Table -> int64 `[partitions]`, confirmed before the state was put.
        lost: Table -> a partition that a writer found lost.
    """

    exists: bool
    state: bytes | None = field(repr=False)
    check: int
    sequence: int
    stamps: Mapping[str, Int64] = field(repr=False)
    lost: Mapping[str, int]

    @classmethod
    def of(cls, pairs: list[bytes]) -> Self:
        """From the answer to HGETALL. Raises `StoreBroken` where it is something else."""
        fields = dict(zip(pairs[::2], pairs[1::2], strict=True))
        try:
            stamps = {
                name[len(_STAMPS) :].decode(): np.frombuffer(value, "<i8").astype(np.int64)
                for name, value in fields.items()
                if name.startswith(_STAMPS)
            }
            lost = {name[len(_LOST) :].decode(): int(value) for name, value in fields.items() if name.startswith(_LOST)}
            check = int.from_bytes(fields.get(_CHECK, b""), "little")
            return cls(bool(fields), fields.get(_STATE), check, sequence_of(fields.get(SEQUENCE)), stamps, lost)
        except MALFORMED as error:
            raise StoreBroken(f"the state of the tier in Redis is corrupt: {error}") from error

    def checked(self, place: object) -> bytes | None:
        """The engine's state. Raises `StoreBroken` where it is not what was put."""
        if self.state is not None and zlib.crc32(self.state) != self.check:
            raise StoreBroken(
                f"the state of the store at {place} is corrupt: its {len(self.state)} bytes do not have the checksum "
                "that was written with them. Go back to a checkpoint"
            )
        return self.state

    def known(self, table: RecordTable) -> Int64:
        """int64 `[partitions]`: stamps that no partition of the table may be behind, 0 where none was confirmed."""
        known = self.stamps.get(table.table.name)
        if known is None:
            return np.zeros(table.partitions, np.int64)
        if len(known) != table.partitions:
            raise StoreBroken(
                f"the tier in Redis confirmed {len(known)} stamps of table {table.table.name!r}, which has "
                f"{table.partitions} partitions"
            )
        return known

    @staticmethod
    def put(key: bytes, state: bytes, stamps: Mapping[str, Int64], sequence: int) -> list[Command]:
        """The command that writes it anew. Raises `BadInput` for a state that is too long."""
        if len(state) > _MOST_STATE_BYTES:
            raise BadInput(f"the state has {len(state)} bytes; redis keeps at most {_MOST_STATE_BYTES} in one value")
        words: list[str | bytes | int | float] = ["HSET", key, _STATE, state, _CHECK]
        words.append(zlib.crc32(state).to_bytes(4, "little"))
        words += [SEQUENCE, sequence.to_bytes(8, "little", signed=True)]
        for name, known in stamps.items():
            words += [_STAMPS + name.encode(), known.astype("<i8").tobytes()]
        return [tuple(words)]

    @staticmethod
    def forget(key: bytes, table: str, sequence: int) -> list[Command]:
        """The commands that take a table out, `sequence` being the greatest of its stamps and all others."""
        return [
            ("HDEL", key, _STAMPS + table.encode(), _LOST + table.encode()),
            *TierState.began(key, sequence),
        ]

    @staticmethod
    def began(key: bytes, sequence: int) -> list[Command]:
        """The command that notes the greatest sequence that a write began with."""
        return [("HSET", key, SEQUENCE, sequence.to_bytes(8, "little", signed=True))]

    @staticmethod
    def mark(key: bytes, table: str, partition: int) -> list[Command]:
        """The command that notes a partition which a writer found lost."""
        return [("HSET", key, _LOST + table.encode(), partition)]


def sequence_of(value: bytes | None) -> int:
    """The sequence in a server's answer, 0 where there is none."""
    return int.from_bytes(value or b"", "little", signed=True)
