"""Tables as library users hold them, and their rows: lookups, updates, grouping, checks, dtypes, initial values."""

from __future__ import annotations

from elastable.embedding_store.tables.base_store import BaseSource, BaseStore, deliver
from elastable.embedding_store.tables.checks import (
    MAX_VERSION,
    any_outside,
    array_kind,
    as_ids,
    first_inexact,
    refuse_masked,
    require_block,
    require_block_rows,
    require_finite,
    require_finite_of,
    require_from_outside,
    require_gradients,
    require_ids,
    require_numbers,
    require_update,
    require_version,
    why_no_id,
)
from elastable.embedding_store.tables.conversion import Conversion, convert_table, spec_in_dtype
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
from elastable.embedding_store.tables.initial_values import initial_rows, table_key, whole_ids
from elastable.embedding_store.tables.lookups import Bags, require_width, rows_request
from elastable.embedding_store.tables.many_tables import LookupStrategy, lookup_many, update_many
from elastable.embedding_store.tables.row_blocks import chosen_rows, fresh_rows, joined_rows, put_weights, rows_in_order
from elastable.embedding_store.tables.row_dtypes import round_update, rounded_rows, row_values
from elastable.embedding_store.tables.table import EmbeddingTable, size
from elastable.embedding_store.tables.table_reader import TableReader, answer_in_order, answer_requests, look_up
from elastable.embedding_store.tables.table_update import IndexedSlices, SparseGradient, TableSlices, update_tables

__all__ = [
    "MAX_VERSION",
    "Bags",
    "BaseSource",
    "BaseStore",
    "Coalescer",
    "Conversion",
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
    "any_outside",
    "array_kind",
    "as_ids",
    "chosen_rows",
    "coalesce",
    "coalesce_many",
    "convert_table",
    "deliver",
    "first_inexact",
    "fresh_rows",
    "group_ids",
    "initial_rows",
    "joined_rows",
    "look_up",
    "lookup_many",
    "put_weights",
    "refuse_masked",
    "require_block",
    "require_block_rows",
    "require_finite",
    "require_finite_of",
    "require_from_outside",
    "require_gradients",
    "require_ids",
    "require_numbers",
    "require_update",
    "require_version",
    "require_width",
    "round_update",
    "rounded_rows",
    "row_values",
    "rows_in_order",
    "rows_request",
    "size",
    "spec_in_dtype",
    "sum_by_position",
    "table_key",
    "unique_ids",
    "update_many",
    "update_tables",
    "whole_ids",
    "why_no_id",
]
