"""All tables of a store with their keys, encoded once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import TableNotFound
from elastable.embedding_store.tiers.redis.record_requests import Keys
from elastable.embedding_store.tiers.redis.schema import hash_slot
from elastable.embedding_store.tiers.redis.schema_1 import TableRecord, before_key, slots_key, weights_key

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
        keys: Weights keys of all partitions of all tables, then their slots keys, then those of before-images.
        names: Weights key, slots key and key of before-images of each partition.
        hash_slots: int64 `[3 * partitions of all tables]`, of each key.
    """

    tables: Mapping[str, TableKeys]
    keys: Keys
    names: Sequence[tuple[bytes, bytes, bytes]]
    hash_slots: Int64

    @classmethod
    def of(cls, namespace: str, records: Iterable[TableRecord]) -> Self:
        """The catalog of these tables."""
        tables: dict[str, TableKeys] = {}
        names: list[tuple[bytes, bytes, bytes]] = []
        for record in records:
            tables[record.spec.name] = TableKeys(record.spec, record.partitions, len(names))
            of = namespace, record.spec.name
            names += [(weights_key(*of, p), slots_key(*of, p), before_key(*of, p)) for p in range(record.partitions)]
        hash_slots = np.array([hash_slot(weights) for weights, _, _ in names], np.int64)
        keys = Keys.of([kinds[kind] for kind in range(3) for kinds in names])
        return cls(tables, keys, names, np.tile(hash_slots, 3))

    @property
    def partitions(self) -> int:
        """Of all tables together."""
        return len(self.names)

    def partition(self, table: str, number: int) -> tuple[bytes, bytes, bytes]:
        """Weights key, slots key and key of before-images of one of a table's partitions."""
        return self.names[self.tables[table].first + number]

    def table(self, name: str) -> TableKeys:
        """The table of that name.

        Raises:
            TableNotFound: there is none; names those there are.
        """
        found = self.tables.get(name)
        if found is None:
            raise TableNotFound(f"no table {name!r} (tables: {', '.join(sorted(self.tables)) or 'none'})")
        return found
