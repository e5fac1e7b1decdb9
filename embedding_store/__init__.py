"""Embedding tables: what a table is, where its rows lie, how they change. Never imports TensorFlow."""

from importlib import import_module
from typing import TYPE_CHECKING

from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableStatistics, TableUpdate
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.contract.spec import (
    INITIALIZER_KINDS,
    SCALED_INITIALIZERS,
    WEIGHT_DTYPES,
    AdmissionSpec,
    EvictionSpec,
    InitializerSpec,
    OptimizerSpec,
    ShardOrigin,
    TableSpec,
)
from elastable.embedding_store.contract.store import EmbeddingStore
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

if TYPE_CHECKING:
    from elastable.embedding_store.composite.moving import repartition
    from elastable.embedding_store.composite.partitioned_store import PartitionedStore
    from elastable.embedding_store.engine.memory_store import MemoryStore
    from elastable.embedding_store.optimizers.base import RowOptimizer, SlotSpec
    from elastable.embedding_store.optimizers.registry import register_row_optimizer
    from elastable.embedding_store.tables.checks import as_ids, require_finite, require_gradients, require_ids
    from elastable.embedding_store.tables.conversion import Conversion, convert_table
    from elastable.embedding_store.tables.grouping import (
        Coalescer,
        Grouping,
        Indexer,
        coalesce,
        coalesce_many,
        group_ids,
        unique_ids,
    )
    from elastable.embedding_store.tables.initial_values import initial_rows
    from elastable.embedding_store.tables.lookups import Bags
    from elastable.embedding_store.tables.many_tables import LookupStrategy, lookup_many, update_many
    from elastable.embedding_store.tables.table import EmbeddingTable, size
    from elastable.embedding_store.tables.table_update import IndexedSlices, TableSlices, update_tables
    from elastable.embedding_store.wire.access.credentials import Credentials
    from elastable.embedding_store.wire.remote_store import RemoteSource, RemoteStore
    from elastable.embedding_store.wire.shared.shared_source import SharedSource
    from elastable.embedding_store.wire.shared.shared_store import SharedMemoryStore

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
    "Credentials",
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

# Loaded when first named: they need compiled kernels or a client library.
_NAMES_OF = {
    "composite.moving": "repartition",
    "composite.partitioned_store": "PartitionedStore",
    "engine.memory_store": "MemoryStore",
    "optimizers.base": "RowOptimizer SlotSpec",
    "optimizers.registry": "register_row_optimizer",
    "tables.checks": "as_ids require_finite require_gradients require_ids",
    "tables.conversion": "Conversion convert_table",
    "tables.grouping": "Coalescer Grouping Indexer coalesce coalesce_many group_ids unique_ids",
    "tables.initial_values": "initial_rows",
    "tables.lookups": "Bags",
    "tables.many_tables": "LookupStrategy lookup_many update_many",
    "tables.table": "EmbeddingTable size",
    "tables.table_update": "IndexedSlices TableSlices update_tables",
    "wire.access.credentials": "Credentials",
    "wire.remote_store": "RemoteSource RemoteStore",
    "wire.shared.shared_source": "SharedSource",
    "wire.shared.shared_store": "SharedMemoryStore",
}
_HOMES = {name: module for module, names in _NAMES_OF.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
