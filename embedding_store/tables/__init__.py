"""Tables as library users hold them, and their rows: lookups, updates, grouping, checks, dtypes, initial values."""

from __future__ import annotations

from elastable.embedding_store.tables.base_store import BaseSource, BaseStore, deliver
from elastable.embedding_store.tables.grouping import (
    Coalescer,
    GradientPart,
    Grouping,
    Indexer,
    coalesce,
    coalesce_many,
    group_ids,
    sum_by_position,
    unique_ids,
)
from elastable.embedding_store.tables.lookups import Bags, require_width, rows_request
from elastable.embedding_store.tables.many_tables import LookupStrategy, lookup_many, update_many
from elastable.embedding_store.tables.table import EmbeddingTable, size
from elastable.embedding_store.tables.table_reader import TableReader, answer_in_order, answer_requests, look_up
from elastable.embedding_store.tables.table_update import IndexedSlices, SparseGradient, TableSlices, update_tables

__all__ = [
    "Bags",
    "BaseSource",
    "BaseStore",
    "Coalescer",
    "EmbeddingTable",
    "GradientPart",
    "Grouping",
    "IndexedSlices",
    "Indexer",
    "LookupStrategy",
    "SparseGradient",
    "TableReader",
    "TableSlices",
    "answer_in_order",
    "answer_requests",
    "coalesce",
    "coalesce_many",
    "deliver",
    "group_ids",
    "look_up",
    "lookup_many",
    "require_width",
    "rows_request",
    "size",
    "sum_by_position",
    "unique_ids",
    "update_many",
    "update_tables",
]
