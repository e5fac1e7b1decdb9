"""Tables of records as the registry in Redis describes them, with the keys of their partitions encoded once."""

from __future__ import annotations

import base64
import json
import secrets
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.malformed import MALFORMED, Document
from elastable.embedding_store.contract.tier import TierTable
from elastable.embedding_store.errors import StoreBroken, Unsupported
from elastable.embedding_store.tiers.redis.records.record_requests import Keys
from elastable.embedding_store.tiers.redis.schema import SCHEMA, check_partitions, hash_slot, rows_key

__all__ = ["RecordTable"]


@dataclass(frozen=True, slots=True, eq=False)
class RecordTable:
    """A table and where its partitions are.

    Attributes:
        table: As the tier's contract describes it.
        partitions: How many.
        made: Random text, of this table and no other one of its name.
        dropped: Whether its deletion has begun.
        names: Key of each partition.
        keys: The same, encoded.
        hash_slots: int64 `[partitions]`.
    """

    table: TierTable
    partitions: int
    made: str
    dropped: bool
    names: tuple[bytes, ...] = field(repr=False)
    keys: Keys = field(repr=False)
    hash_slots: Int64 = field(repr=False)

    @classmethod
    def of(cls, namespace: str, table: TierTable, partitions: int, made: str = "", dropped: bool = False) -> Self:
        """A table under a namespace; `made` is drawn where none is given."""
        names = tuple(rows_key(namespace, table.name, p) for p in range(check_partitions(partitions)))
        slots = np.array([hash_slot(name) for name in names], np.int64)
        return cls(table, partitions, made or secrets.token_hex(8), dropped, names, Keys.of(list(names)), slots)

    def to_json(self, dropped: bool = False) -> str:
        """The registry's value."""
        fields = {
            "schema": SCHEMA,
            "partitions": self.partitions,
            "record_bytes": self.table.record_bytes,
            "description": base64.b64encode(self.table.description).decode(),
            "made": self.made,
            **({"dropped": True} if dropped else {}),
        }
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, namespace: str, name: bytes, text: bytes) -> Self:
        """Reads what `to_json` wrote.

        Raises:
            StoreBroken: it is something else.
            Unsupported: it is of another key schema.
        """
        try:
            fields: Document = json.loads(text)
            if int(fields["schema"]) != SCHEMA:
                raise Unsupported(
                    f"table {name.decode(errors='replace')!r} in Redis has key schema {int(fields['schema'])}, this "
                    f"release reads {SCHEMA}: use the release that wrote it"
                )
            description = base64.b64decode(fields["description"], validate=True)
            table = TierTable(name.decode(), int(fields["record_bytes"]), description)
            if table.record_bytes < 1:
                raise ValueError("record_bytes must be at least 1")
            made, dropped = str(fields["made"]), bool(fields.get("dropped", False))
            return cls.of(namespace, table, int(fields["partitions"]), made, dropped)
        except MALFORMED as error:
            raise StoreBroken(f"the registry of tables holds {text[:200]!r}, no table: {error}") from error
