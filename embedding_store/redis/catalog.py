"""All tables of a store with their keys, encoded once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from embedding_store.errors import TableNotFound
from embedding_store.redis.resp_codec import Keys
from embedding_store.redis.schema import TableRecord, hash_slot, slots_key, weights_key
from embedding_store.spec import TableSpec
from embedding_store.store import Int64

__all__ = ["Catalog", "TableKeys"]


@dataclass(frozen=True, slots=True)
class TableKeys:
    """Where a table's partitions stand among those of all tables.

    Attributes:
        spec: The table.
        partitions: How many.
        first: Place of its partition 0.
    """

    spec: TableSpec
    partitions: int
    first: int


@dataclass(frozen=True, slots=True)
class Catalog:
    """The tables at some moment; tables are added, never changed.

    Attributes:
        tables: By name.
        keys: Weights keys of all partitions of all tables, then their slots keys.
        hash_slots: int64 `[2 * partitions of all tables]`, of each key.
    """

    tables: Mapping[str, TableKeys]
    keys: Keys
    hash_slots: Int64

    @classmethod
    def of(cls, namespace: str, records: Iterable[TableRecord]) -> Self:
        """The catalog of these tables."""
        tables: dict[str, TableKeys] = {}
        weights: list[bytes] = []
        slots: list[bytes] = []
        for record in records:
            name = record.spec.name
            tables[name] = TableKeys(record.spec, record.partitions, len(weights))
            weights += [weights_key(namespace, name, partition) for partition in range(record.partitions)]
            slots += [slots_key(namespace, name, partition) for partition in range(record.partitions)]
        hash_slots = np.array([hash_slot(key) for key in weights], np.int64)
        return cls(tables, Keys.of(weights + slots), np.concatenate((hash_slots, hash_slots)))

    @property
    def partitions(self) -> int:
        """Of all tables together."""
        return len(self.hash_slots) // 2

    def table(self, name: str) -> TableKeys:
        """The table of that name.

        Raises:
            TableNotFound: there is none; names those there are.
        """
        found = self.tables.get(name)
        if found is None:
            raise TableNotFound(f"no table {name!r} (tables: {', '.join(sorted(self.tables)) or 'none'})")
        return found
