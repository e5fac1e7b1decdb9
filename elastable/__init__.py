"""Elastable: the parameter server that Keras 3 does not have.

`import elastable as et`:

* layers: `Embedding`, `EdlEmbedding`
* training here: `fit`
* data: `NumpyReader`, `ParquetReader`, `CsvReader`
* stores: `MemoryStore`, `RedisStore`, `open_store`, `TableSpec`, `OptimizerSpec`, `InitializerSpec`
* export: `export_keras`
* errors: `ElastableError` and its kinds, in `embedding_store.errors`
"""

from __future__ import annotations

from elastable.in_process import fit
from embedding_store.errors import ElastableError
from embedding_store.memory import MemoryStore
from embedding_store.open_store import open_store
from embedding_store.redis_store import RedisStore
from embedding_store.spec import InitializerSpec, OptimizerSpec, TableSpec
from worker.edl_embedding import EdlEmbedding
from worker.embedding import Embedding
from worker.export import export_keras
from worker.readers import CsvReader, NumpyReader, ParquetReader

__version__ = "0.1.0"

__all__ = [
    "CsvReader",
    "EdlEmbedding",
    "ElastableError",
    "Embedding",
    "InitializerSpec",
    "MemoryStore",
    "NumpyReader",
    "OptimizerSpec",
    "ParquetReader",
    "RedisStore",
    "TableSpec",
    "export_keras",
    "fit",
    "open_store",
]
