"""Defaults that most sources and stores share, made of the methods that each implements."""

from __future__ import annotations

from collections.abc import Sequence

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.rows.row_blocks import rows_by_scan
from elastable.embedding_store.tables.lookup_request import LookupRequest
from elastable.embedding_store.tables.plain_lookup import lookup_through
from elastable.embedding_store.tables.table import EmbeddingTable

__all__ = ["BaseSource", "BaseStore"]


class BaseSource(RowSource):
    """A source that answers requests by its plain `lookup`, one for all of them."""

    def lookup_into(self, requests: Sequence[LookupRequest], version: int | None = None, split: bool = True) -> None:
        lookup_through(self, requests, version)


class BaseStore(BaseSource, EmbeddingStore):
    """A store whose tables are `EmbeddingTable`s, and which scans for rows."""

    def table(self, of: TableSpec | str) -> EmbeddingTable:
        if isinstance(of, TableSpec):
            self.create_table(of)
        return EmbeddingTable(self, of.name if isinstance(of, TableSpec) else of)

    def read_rows(self, table: str, ids: Int64) -> RowBlock:
        return rows_by_scan(self, table, ids)
