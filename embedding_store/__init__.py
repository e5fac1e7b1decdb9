"""Embedding tables: what a table is, where its rows lie, how they change. Never imports TensorFlow."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastable.embedding_store.composite.moving import repartition as repartition
    from elastable.embedding_store.composite.partitioned_store import PartitionedStore as PartitionedStore
    from elastable.embedding_store.contract.row_data import Commit as Commit
    from elastable.embedding_store.contract.row_data import RowBlock as RowBlock
    from elastable.embedding_store.contract.row_data import TableStatistics as TableStatistics
    from elastable.embedding_store.contract.row_data import TableUpdate as TableUpdate
    from elastable.embedding_store.contract.row_source import RowSource as RowSource
    from elastable.embedding_store.contract.spec import INITIALIZER_KINDS as INITIALIZER_KINDS
    from elastable.embedding_store.contract.spec import SCALED_INITIALIZERS as SCALED_INITIALIZERS
    from elastable.embedding_store.contract.spec import WEIGHT_DTYPES as WEIGHT_DTYPES
    from elastable.embedding_store.contract.spec import AdmissionSpec as AdmissionSpec
    from elastable.embedding_store.contract.spec import EvictionSpec as EvictionSpec
    from elastable.embedding_store.contract.spec import InitializerSpec as InitializerSpec
    from elastable.embedding_store.contract.spec import OptimizerSpec as OptimizerSpec
    from elastable.embedding_store.contract.spec import ShardOrigin as ShardOrigin
    from elastable.embedding_store.contract.spec import TableSpec as TableSpec
    from elastable.embedding_store.contract.store import EmbeddingStore as EmbeddingStore
    from elastable.embedding_store.engine.memory_store import MemoryStore as MemoryStore
    from elastable.embedding_store.optimizers.base import RowOptimizer as RowOptimizer
    from elastable.embedding_store.optimizers.base import SlotSpec as SlotSpec
    from elastable.embedding_store.optimizers.registry import register_row_optimizer as register_row_optimizer
    from elastable.embedding_store.tables.checks import as_ids as as_ids
    from elastable.embedding_store.tables.checks import require_gradients as require_gradients
    from elastable.embedding_store.tables.checks import require_ids as require_ids
    from elastable.embedding_store.tables.grouping import Coalescer as Coalescer
    from elastable.embedding_store.tables.grouping import Grouping as Grouping
    from elastable.embedding_store.tables.grouping import Indexer as Indexer
    from elastable.embedding_store.tables.grouping import coalesce as coalesce
    from elastable.embedding_store.tables.grouping import coalesce_many as coalesce_many
    from elastable.embedding_store.tables.grouping import unique_ids as unique_ids
    from elastable.embedding_store.tables.initial_values import initial_rows as initial_rows
    from elastable.embedding_store.tables.lookups import Bags as Bags
    from elastable.embedding_store.tables.many_tables import LookupStrategy as LookupStrategy
    from elastable.embedding_store.tables.many_tables import lookup_many as lookup_many
    from elastable.embedding_store.tables.many_tables import update_many as update_many
    from elastable.embedding_store.tables.row_blocks import convert_table as convert_table
    from elastable.embedding_store.tables.table import EmbeddingTable as EmbeddingTable
    from elastable.embedding_store.tables.table import size as size
    from elastable.embedding_store.tables.table_update import IndexedSlices as IndexedSlices
    from elastable.embedding_store.tables.table_update import TableSlices as TableSlices
    from elastable.embedding_store.tables.table_update import update_tables as update_tables
    from elastable.embedding_store.wire.access.credentials import Credentials as Credentials
    from elastable.embedding_store.wire.pushes.remote_store import RemoteStore as RemoteStore
    from elastable.embedding_store.wire.remote_source import RemoteSource as RemoteSource
    from elastable.embedding_store.wire.shared.shared_source import SharedSource as SharedSource
    from elastable.embedding_store.wire.shared.shared_store import SharedMemoryStore as SharedMemoryStore

# Loaded when first named: most need compiled kernels or a client library.
_NAMES_OF = {
    "contract.row_data": "Commit RowBlock TableStatistics TableUpdate",
    "contract.row_source": "RowSource",
    "contract.spec": "INITIALIZER_KINDS SCALED_INITIALIZERS WEIGHT_DTYPES AdmissionSpec EvictionSpec InitializerSpec "
    "OptimizerSpec ShardOrigin TableSpec",
    "contract.store": "EmbeddingStore",
    "composite.moving": "repartition",
    "composite.partitioned_store": "PartitionedStore",
    "engine.memory_store": "MemoryStore",
    "optimizers.base": "RowOptimizer SlotSpec",
    "optimizers.registry": "register_row_optimizer",
    "tables.checks": "as_ids require_gradients require_ids",
    "tables.grouping": "Coalescer Grouping Indexer coalesce coalesce_many unique_ids",
    "tables.initial_values": "initial_rows",
    "tables.lookups": "Bags",
    "tables.many_tables": "LookupStrategy lookup_many update_many",
    "tables.row_blocks": "convert_table",
    "tables.table": "EmbeddingTable size",
    "tables.table_update": "IndexedSlices TableSlices update_tables",
    "wire.access.credentials": "Credentials",
    "wire.remote_source": "RemoteSource",
    "wire.pushes.remote_store": "RemoteStore",
    "wire.shared.shared_source": "SharedSource",
    "wire.shared.shared_store": "SharedMemoryStore",
}
_HOMES = {name: module for module, names in _NAMES_OF.items() for name in names.split()}
__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
