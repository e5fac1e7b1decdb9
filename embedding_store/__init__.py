"""Embedding tables: what a table is, where its rows lie, how they change. Never imports TensorFlow.

Names that need compiled kernels or a client library load at their first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from embedding_store.errors import (
    BadGradient,
    BadIds,
    BadInput,
    BadSpec,
    CheckpointError,
    DeadlineExceeded,
    ElastableError,
    FutureVersion,
    IdOutOfRange,
    JobFailed,
    ModelError,
    NotFinite,
    NotJoined,
    SpecConflict,
    StaleVersion,
    StoreFailed,
    TableNotFound,
    Unavailable,
    Unsupported,
    VersionError,
)
from embedding_store.spec import (
    INITIALIZER_KINDS,
    WEIGHT_DTYPES,
    AdmissionSpec,
    EvictionSpec,
    InitializerSpec,
    OptimizerSpec,
    ShardOrigin,
    TableSpec,
)
from embedding_store.store import Commit, EmbeddingStore, RowBlock, RowSource, TableStatistics, TableUpdate
from embedding_store.variance_scaling import SCALED_INITIALIZERS

if TYPE_CHECKING:
    from embedding_store.cached_source import CachedSource
    from embedding_store.cached_store import CachedStore
    from embedding_store.checks import as_ids, require_finite, require_gradients, require_ids
    from embedding_store.conversion import Conversion, convert_table
    from embedding_store.file_store import FileStore
    from embedding_store.grouping import Coalescer, coalesce, coalesce_many
    from embedding_store.indexer import Grouping, Indexer, group_ids, unique_ids
    from embedding_store.initial_values import initial_rows
    from embedding_store.lookup_request import Bags
    from embedding_store.many_tables import LookupStrategy, lookup_many
    from embedding_store.memory import MemoryStore
    from embedding_store.partitioned import PartitionedStore
    from embedding_store.remote import RemoteSource
    from embedding_store.remote_store import RemoteStore
    from embedding_store.repartition import repartition
    from embedding_store.row_optimizer import RowOptimizer, SlotSpec, register_row_optimizer
    from embedding_store.shared_source import SharedSource
    from embedding_store.shared_store import SharedMemoryStore
    from embedding_store.table import EmbeddingTable
    from embedding_store.table_update import IndexedSlices, TableSlices, update_many, update_tables

__all__ = [  # noqa: RUF022 - grouped, as a map of the package
    # What a table is.
    "INITIALIZER_KINDS",
    "SCALED_INITIALIZERS",
    "WEIGHT_DTYPES",
    "AdmissionSpec",
    "EvictionSpec",
    "InitializerSpec",
    "OptimizerSpec",
    "ShardOrigin",
    "TableSpec",
    # What a store does.
    "Commit",
    "EmbeddingStore",
    "RowBlock",
    "RowSource",
    "TableStatistics",
    "TableUpdate",
    # Tables without a cluster.
    "Bags",
    "EmbeddingTable",
    "IndexedSlices",
    "LookupStrategy",
    "TableSlices",
    "lookup_many",
    "update_many",
    "update_tables",
    # Stores.
    "CachedSource",
    "CachedStore",
    "FileStore",
    "MemoryStore",
    "PartitionedStore",
    "RemoteSource",
    "RemoteStore",
    "SharedMemoryStore",
    "SharedSource",
    "repartition",
    # Tables in another dtype.
    "Conversion",
    "convert_table",
    # Rows: initial values, id sets, sums of gradients.
    "Coalescer",
    "Grouping",
    "Indexer",
    "coalesce",
    "coalesce_many",
    "group_ids",
    "initial_rows",
    "unique_ids",
    # Optimizers over rows.
    "RowOptimizer",
    "SlotSpec",
    "register_row_optimizer",
    # Refusing what does not fit.
    "as_ids",
    "require_finite",
    "require_gradients",
    "require_ids",
    # Errors.
    "BadGradient",
    "BadIds",
    "BadInput",
    "BadSpec",
    "CheckpointError",
    "DeadlineExceeded",
    "ElastableError",
    "FutureVersion",
    "IdOutOfRange",
    "JobFailed",
    "ModelError",
    "NotFinite",
    "NotJoined",
    "SpecConflict",
    "StaleVersion",
    "StoreFailed",
    "TableNotFound",
    "Unavailable",
    "Unsupported",
    "VersionError",
]

_LOADED_LATE = {
    "Bags": "lookup_request",
    "CachedSource": "cached_source",
    "CachedStore": "cached_store",
    "Coalescer": "grouping",
    "Conversion": "conversion",
    "EmbeddingTable": "table",
    "FileStore": "file_store",
    "Grouping": "indexer",
    "IndexedSlices": "table_update",
    "Indexer": "indexer",
    "LookupStrategy": "many_tables",
    "MemoryStore": "memory",
    "PartitionedStore": "partitioned",
    "RemoteSource": "remote",
    "RemoteStore": "remote_store",
    "RowOptimizer": "row_optimizer",
    "SharedMemoryStore": "shared_store",
    "SharedSource": "shared_source",
    "SlotSpec": "row_optimizer",
    "TableSlices": "table_update",
    "as_ids": "checks",
    "coalesce": "grouping",
    "coalesce_many": "grouping",
    "convert_table": "conversion",
    "group_ids": "indexer",
    "initial_rows": "initial_values",
    "lookup_many": "many_tables",
    "register_row_optimizer": "row_optimizer",
    "repartition": "repartition",
    "require_finite": "checks",
    "require_gradients": "checks",
    "require_ids": "checks",
    "unique_ids": "indexer",
    "update_many": "table_update",
    "update_tables": "table_update",
}


def __getattr__(name: str) -> object:
    if name not in _LOADED_LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_LOADED_LATE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
