"""Embedding tables: what a table is, where its rows lie, how they change. Never imports TensorFlow.

Names that need compiled kernels or a client library load at their first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from elastable.embedding_store.errors import (
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
    StoreBroken,
    StoreFailed,
    TableNotFound,
    Unauthenticated,
    Unavailable,
    Unsupported,
    VersionError,
)
from elastable.embedding_store.spec import (
    INITIALIZER_KINDS,
    WEIGHT_DTYPES,
    AdmissionSpec,
    EvictionSpec,
    InitializerSpec,
    OptimizerSpec,
    ShardOrigin,
    TableSpec,
)
from elastable.embedding_store.store import Commit, EmbeddingStore, RowBlock, RowSource, TableStatistics, TableUpdate
from elastable.embedding_store.variance_scaling import SCALED_INITIALIZERS

if TYPE_CHECKING:
    from elastable.embedding_store.cached.source import CachedSource
    from elastable.embedding_store.cached.store import CachedStore
    from elastable.embedding_store.checks import as_ids, require_finite, require_gradients, require_ids
    from elastable.embedding_store.conversion import Conversion, convert_table
    from elastable.embedding_store.files.store import FileStore
    from elastable.embedding_store.initial_values import initial_rows
    from elastable.embedding_store.memory.store import MemoryStore
    from elastable.embedding_store.partitions.repartition import repartition
    from elastable.embedding_store.partitions.store import PartitionedStore
    from elastable.embedding_store.row_optimizer import RowOptimizer, SlotSpec, register_row_optimizer
    from elastable.embedding_store.rpc.credentials import Credentials
    from elastable.embedding_store.rpc.remote import RemoteSource
    from elastable.embedding_store.rpc.remote_store import RemoteStore
    from elastable.embedding_store.shared.source import SharedSource
    from elastable.embedding_store.shared.store import SharedMemoryStore
    from elastable.embedding_store.tables.grouping import Coalescer, coalesce, coalesce_many
    from elastable.embedding_store.tables.indexer import Grouping, Indexer, group_ids, unique_ids
    from elastable.embedding_store.tables.lookup_request import Bags
    from elastable.embedding_store.tables.many_tables import LookupStrategy, lookup_many
    from elastable.embedding_store.tables.table import EmbeddingTable, size
    from elastable.embedding_store.tables.table_update import IndexedSlices, TableSlices, update_many, update_tables

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
    "size",
    "update_many",
    "update_tables",
    # Stores.
    "CachedSource",
    "CachedStore",
    "Credentials",
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
    "StoreBroken",
    "StoreFailed",
    "TableNotFound",
    "Unauthenticated",
    "Unavailable",
    "Unsupported",
    "VersionError",
]

_LOADED_LATE = {
    "Bags": "tables.lookup_request",
    "CachedSource": "cached.source",
    "CachedStore": "cached.store",
    "Coalescer": "tables.grouping",
    "Conversion": "conversion",
    "Credentials": "rpc.credentials",
    "EmbeddingTable": "tables.table",
    "FileStore": "files.store",
    "Grouping": "tables.indexer",
    "IndexedSlices": "tables.table_update",
    "Indexer": "tables.indexer",
    "LookupStrategy": "tables.many_tables",
    "MemoryStore": "memory.store",
    "PartitionedStore": "partitions.store",
    "RemoteSource": "rpc.remote",
    "RemoteStore": "rpc.remote_store",
    "RowOptimizer": "row_optimizer",
    "SharedMemoryStore": "shared.store",
    "SharedSource": "shared.source",
    "SlotSpec": "row_optimizer",
    "TableSlices": "tables.table_update",
    "as_ids": "checks",
    "coalesce": "tables.grouping",
    "coalesce_many": "tables.grouping",
    "convert_table": "conversion",
    "group_ids": "tables.indexer",
    "initial_rows": "initial_values",
    "lookup_many": "tables.many_tables",
    "register_row_optimizer": "row_optimizer",
    "repartition": "partitions.repartition",
    "require_finite": "checks",
    "require_gradients": "checks",
    "require_ids": "checks",
    "size": "tables.table",
    "unique_ids": "tables.indexer",
    "update_many": "tables.table_update",
    "update_tables": "tables.table_update",
}


def __getattr__(name: str) -> object:
    if name not in _LOADED_LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_LOADED_LATE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
