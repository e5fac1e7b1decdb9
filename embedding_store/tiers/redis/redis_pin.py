"""A pinned version of a store in Redis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.pins import require_lease
from elastable.embedding_store.contract.row_data import RowBlock, TableState
from elastable.embedding_store.contract.row_source import refuse_other_version
from elastable.embedding_store.rows.checks import require_block_rows, require_ids
from elastable.embedding_store.rows.row_blocks import joined_rows
from elastable.embedding_store.tables.base_store import BaseSnapshot
from elastable.embedding_store.tiers.redis.registry import PinEntry
from elastable.embedding_store.tiers.redis.row_scan import ids_then, in_blocks, rows_then

if TYPE_CHECKING:
    from elastable.embedding_store.tiers.redis.redis_store import RedisStore

__all__ = ["RedisPin"]


class RedisPin(BaseSnapshot):
    """As `Snapshot`: of every process that asks, as it stands in Redis.

    Reads go through the store that it was made from, and end with it.
    """

    def __init__(self, store: RedisStore, token: bytes, entry: PinEntry) -> None:
        self._store, self._token, self._entry = store, token, entry
        self._lease_s = entry.lease_s
        super().__init__(entry.version, store.specs)

    def lookup(self, ids: Mapping[str, Int64], version: int | None = None) -> dict[str, Float32]:
        refuse_other_version(self._version, version)
        self._require_open()
        return self._store.lookup_then(ids, self._version, self._token)

    def row_count(self, table: str) -> int:
        self._require_standing()
        catalog, found, topology, seconds = self._store.where(table)
        count = rows_then(topology, catalog, found, self._entry.moment, seconds)
        self._require_standing()
        return count

    def scan(self, table: str, block_rows: int = 65_536) -> Iterator[RowBlock]:
        self._require_standing()
        catalog, found, topology, seconds = self._store.where(table)
        ids = ids_then(topology, catalog, found, self._entry.moment, seconds)
        return in_blocks(ids, require_block_rows(block_rows), lambda some: self._rows(table, some))

    def read_rows(self, table: str, ids: Int64) -> RowBlock:
        self._require_open()
        spec = self._store.where(table)[1].spec
        rows = self._rows(table, require_ids(spec, ids))
        return joined_rows(spec, [] if rows is None else [rows])

    def table_state(self, table: str) -> TableState:
        """Empty: tables in Redis keep nothing besides their rows. Raises `TableNotFound`."""
        self._require_standing()
        self._store.where(table)
        return TableState()

    def renew(self, lease_s: float | None = None) -> None:
        self._lease_s = self._lease_s if lease_s is None else require_lease(lease_s)
        self._require_open()
        self._store.pin_registry.renew(self._token, self._version, self._lease_s, self._store.deadline())

    def _release(self) -> None:
        """The next commit drops the before-images."""
        self._store.pin_registry.release(self._token, self._store.deadline())

    def _rows(self, table: str, ids: Int64) -> RowBlock | None:
        """Of some ids the rows that there were; None: there were none."""
        self._require_open()
        block = self._store.block_then({table: ids}, self._version, self._token).tables[table]
        held = np.flatnonzero(block.no_weights == 0)
        return RowBlock(ids[held], block.weights[held], block.slots[held]) if len(held) else None

    def _require_standing(self) -> None:
        """Raises `StaleVersion` unless the pin stands, asked of the server."""
        self._require_open()
        self._store.registry().pinned(self._version, self._token)
