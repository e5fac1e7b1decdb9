"""Elastable: the parameter server that Keras 3 does not have.

`import elastable as et`:

* layers: `Embedding`, `EdlEmbedding`
* training here: `fit`; over replicas: `ReplicaTrainer`
* data: `NumpyReader`, `ParquetReader`, `CsvReader`, `StreamReader`
* stores: `MemoryStore`, `RedisStore`, `open_store`, `TableSpec`, `OptimizerSpec`, `InitializerSpec`
* tables of any ids: `AdmissionSpec`, `EvictionSpec`
* locations: `LocationSettings`, `TensorLocationSettings`, `TensorLocation`
* replicas: `replica_group`, `CommGroup`
* export: `export_keras`
* tables in replicas' own memory: `create_host_embedding`, `HostEmbedding`, `HostEmbeddingOptimizerSpec`,
  `HostEmbeddingSGDGAOptimizerSpec`, `save_host_embedding`, `load_host_embedding`
* errors: `ElastableError`; its kinds are in `embedding_store.errors`
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastable.host_embedding_file import load_host_embedding, save_host_embedding
    from elastable.in_process import fit
    from elastable.replica_trainer import ReplicaTrainer
    from embedding_store.errors import ElastableError
    from embedding_store.locations import LocationSettings, TensorLocation, TensorLocationSettings
    from embedding_store.memory.store import MemoryStore
    from embedding_store.open_store import open_store
    from embedding_store.redis.store import RedisStore
    from embedding_store.spec import AdmissionSpec, EvictionSpec, InitializerSpec, OptimizerSpec, TableSpec
    from worker.edl_embedding import EdlEmbedding
    from worker.embedding import Embedding
    from worker.export import export_keras
    from worker.host_embeddings.embedding import HostEmbedding, create_host_embedding
    from worker.host_embeddings.optimizer_spec import HostEmbeddingOptimizerSpec, HostEmbeddingSGDGAOptimizerSpec
    from worker.readers import CsvReader, NumpyReader, ParquetReader, StreamReader
    from worker.replicas.grouping import CommGroup
    from worker.replicas.world import replica_group

__version__ = "0.1.0"

__all__ = [
    "AdmissionSpec",
    "CommGroup",
    "CsvReader",
    "EdlEmbedding",
    "ElastableError",
    "Embedding",
    "EvictionSpec",
    "HostEmbedding",
    "HostEmbeddingOptimizerSpec",
    "HostEmbeddingSGDGAOptimizerSpec",
    "InitializerSpec",
    "LocationSettings",
    "MemoryStore",
    "NumpyReader",
    "OptimizerSpec",
    "ParquetReader",
    "RedisStore",
    "ReplicaTrainer",
    "StreamReader",
    "TableSpec",
    "TensorLocation",
    "TensorLocationSettings",
    "create_host_embedding",
    "export_keras",
    "fit",
    "load_host_embedding",
    "open_store",
    "replica_group",
    "save_host_embedding",
]

# Loaded when first named: `elastable status` must not wait for TensorFlow.
_HOMES = {
    "AdmissionSpec": "embedding_store.spec",
    "CommGroup": "worker.replicas.grouping",
    "CsvReader": "worker.readers",
    "EdlEmbedding": "worker.edl_embedding",
    "ElastableError": "embedding_store.errors",
    "Embedding": "worker.embedding",
    "EvictionSpec": "embedding_store.spec",
    "HostEmbedding": "worker.host_embeddings.embedding",
    "HostEmbeddingOptimizerSpec": "worker.host_embeddings.optimizer_spec",
    "HostEmbeddingSGDGAOptimizerSpec": "worker.host_embeddings.optimizer_spec",
    "InitializerSpec": "embedding_store.spec",
    "LocationSettings": "embedding_store.locations",
    "MemoryStore": "embedding_store.memory.store",
    "NumpyReader": "worker.readers",
    "OptimizerSpec": "embedding_store.spec",
    "ParquetReader": "worker.readers",
    "RedisStore": "embedding_store.redis.store",
    "ReplicaTrainer": "elastable.replica_trainer",
    "StreamReader": "worker.readers",
    "TableSpec": "embedding_store.spec",
    "TensorLocation": "embedding_store.locations",
    "TensorLocationSettings": "embedding_store.locations",
    "create_host_embedding": "worker.host_embeddings.embedding",
    "export_keras": "worker.export",
    "fit": "elastable.in_process",
    "load_host_embedding": "elastable.host_embedding_file",
    "open_store": "embedding_store.open_store",
    "replica_group": "worker.replicas.world",
    "save_host_embedding": "elastable.host_embedding_file",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'elastable' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
