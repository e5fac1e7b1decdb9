"""Elastable: the parameter server that Keras 3 does not have.

`import elastable as et`:

* layers: `Embedding`, `EdlEmbedding`; as in keras-rs: `DistributedEmbedding`, `TableConfig`, `FeatureConfig`
* training here or on a cluster: `fit`, and `step` for loops of your own; over replicas: `ReplicaTrainer`
* what a term of a loss is: `averaged`, `summed`
* data: `NumpyReader`, `ParquetReader`, `CsvReader`, `RayDataReader`, `PartsReader`, `StreamReader`; events:
  `FolderReader`, `KafkaReader`, `RedisStreamReader`; for sources of your own `Reader`, `RaggedArray`, `SparseArray`
* ids of strings: `hash_ids`
* stores: `MemoryStore`, `open_store`, `open_reader`, `TableSpec`, `OptimizerSpec`, `InitializerSpec`
* tables of any ids: `AdmissionSpec`, `EvictionSpec`
* locations: `LocationSettings`, `TensorLocationSettings`, `TensorLocation`
* replicas: `replica_group`, `CommGroup`
* saving: `save`; export: `export_keras`; predictions: `Predictor`
* tables in replicas' own memory: `create_host_embedding`, `HostEmbedding`, `HostEmbeddingOptimizerSpec`,
  `HostEmbeddingSGDGAOptimizerSpec`, `save_host_embedding`, `load_host_embedding`
* traces: `exporting_traces`
* errors: `ElastableError`; its kinds are in `elastable.embedding_store.errors`

A name whose libraries are not installed raises `NotInstalled`, which says which extra of `elastable` brings them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from elastable.embedding_store.support.extras import needs
from elastable.worker.keras.keras_backend import register_trainers, require_backend, when_keras_is_imported

if TYPE_CHECKING:
    __version__: str

    from elastable.embedding_store.composite.locations import LocationSettings as LocationSettings
    from elastable.embedding_store.composite.locations import TensorLocation as TensorLocation
    from elastable.embedding_store.composite.locations import TensorLocationSettings as TensorLocationSettings
    from elastable.embedding_store.contract.spec import AdmissionSpec as AdmissionSpec
    from elastable.embedding_store.contract.spec import EvictionSpec as EvictionSpec
    from elastable.embedding_store.contract.spec import InitializerSpec as InitializerSpec
    from elastable.embedding_store.contract.spec import OptimizerSpec as OptimizerSpec
    from elastable.embedding_store.contract.spec import TableSpec as TableSpec
    from elastable.embedding_store.engine.memory_store import MemoryStore as MemoryStore
    from elastable.embedding_store.errors import ElastableError as ElastableError
    from elastable.embedding_store.native.string_ids import hash_ids as hash_ids
    from elastable.embedding_store.open_store import open_reader as open_reader
    from elastable.embedding_store.open_store import open_store as open_store
    from elastable.in_process.fitting import fit as fit
    from elastable.in_process.tape_step import step as step
    from elastable.models.predictor import Predictor as Predictor
    from elastable.models.saving import save as save
    from elastable.monitoring.tracing import exporting_traces as exporting_traces
    from elastable.replicas.groups.group import CommGroup as CommGroup
    from elastable.replicas.groups.world import replica_group as replica_group
    from elastable.replicas.host_embeddings.host_embedding import HostEmbedding as HostEmbedding
    from elastable.replicas.host_embeddings.host_embedding import create_host_embedding as create_host_embedding
    from elastable.replicas.host_embeddings.host_embedding import load_host_embedding as load_host_embedding
    from elastable.replicas.host_embeddings.host_embedding import save_host_embedding as save_host_embedding
    from elastable.replicas.host_embeddings.host_table import (
        HostEmbeddingOptimizerSpec as HostEmbeddingOptimizerSpec,
    )
    from elastable.replicas.host_embeddings.host_table import (
        HostEmbeddingSGDGAOptimizerSpec as HostEmbeddingSGDGAOptimizerSpec,
    )
    from elastable.replicas.training.trainer import ReplicaTrainer as ReplicaTrainer
    from elastable.worker.layers.distributed_embedding import DistributedEmbedding as DistributedEmbedding
    from elastable.worker.layers.distributed_embedding import FeatureConfig as FeatureConfig
    from elastable.worker.layers.distributed_embedding import TableConfig as TableConfig
    from elastable.worker.layers.embedding import EdlEmbedding as EdlEmbedding
    from elastable.worker.layers.embedding import Embedding as Embedding
    from elastable.worker.losses.loss_terms import averaged as averaged
    from elastable.worker.losses.loss_terms import summed as summed
    from elastable.worker.readers.batch.ragged import RaggedArray as RaggedArray
    from elastable.worker.readers.batch.ragged import SparseArray as SparseArray
    from elastable.worker.readers.batch.reader import Reader as Reader
    from elastable.worker.readers.formats.csv_reader import CsvReader as CsvReader
    from elastable.worker.readers.formats.parquet_reader import ParquetReader as ParquetReader
    from elastable.worker.readers.formats.ray_data_reader import RayDataReader as RayDataReader
    from elastable.worker.readers.numpy_reader import NumpyReader as NumpyReader
    from elastable.worker.readers.pass_reader import PartsReader as PartsReader
    from elastable.worker.readers.stream_reader import StreamReader as StreamReader
    from elastable.worker.readers.streams.folder_reader import FolderReader as FolderReader
    from elastable.worker.readers.streams.kafka_reader import KafkaReader as KafkaReader
    from elastable.worker.readers.streams.redis_stream_reader import RedisStreamReader as RedisStreamReader
    from elastable.worker.user_model.export import export_keras as export_keras

# Loaded when first named: `elastable status` must not wait for TensorFlow.
_NAMES_OF = {
    "elastable.embedding_store.composite.locations": "LocationSettings TensorLocation TensorLocationSettings",
    "elastable.embedding_store.contract.spec": "AdmissionSpec EvictionSpec InitializerSpec OptimizerSpec TableSpec",
    "elastable.embedding_store.engine.memory_store": "MemoryStore",
    "elastable.embedding_store.errors": "ElastableError",
    "elastable.embedding_store.native.string_ids": "hash_ids",
    "elastable.embedding_store.open_store": "open_reader open_store",
    "elastable.in_process.fitting": "fit",
    "elastable.in_process.tape_step": "step",
    "elastable.models.predictor": "Predictor",
    "elastable.models.saving": "save",
    "elastable.monitoring.tracing": "exporting_traces",
    "elastable.replicas.groups.group": "CommGroup",
    "elastable.replicas.host_embeddings.host_embedding": (
        "HostEmbedding create_host_embedding load_host_embedding save_host_embedding"
    ),
    "elastable.replicas.host_embeddings.host_table": "HostEmbeddingOptimizerSpec HostEmbeddingSGDGAOptimizerSpec",
    "elastable.replicas.groups.world": "replica_group",
    "elastable.replicas.training.trainer": "ReplicaTrainer",
    "elastable.worker.layers.distributed_embedding": "DistributedEmbedding FeatureConfig TableConfig",
    "elastable.worker.layers.embedding": "EdlEmbedding Embedding",
    "elastable.worker.losses.loss_terms": "averaged summed",
    "elastable.worker.user_model.export": "export_keras",
    "elastable.worker.readers.formats.csv_reader": "CsvReader",
    "elastable.worker.readers.formats.parquet_reader": "ParquetReader",
    "elastable.worker.readers.formats.ray_data_reader": "RayDataReader",
    "elastable.worker.readers.numpy_reader": "NumpyReader",
    "elastable.worker.readers.batch.ragged": "RaggedArray SparseArray",
    "elastable.worker.readers.batch.reader": "Reader",
    "elastable.worker.readers.pass_reader": "PartsReader",
    "elastable.worker.readers.stream_reader": "StreamReader",
    "elastable.worker.readers.streams.folder_reader": "FolderReader",
    "elastable.worker.readers.streams.kafka_reader": "KafkaReader",
    "elastable.worker.readers.streams.redis_stream_reader": "RedisStreamReader",
}
_HOMES = {name: module for module, names in _NAMES_OF.items() for name in names.split()}
__all__ = list(_HOMES)
_WITHOUT_KERAS = (
    "elastable.embedding_store", "elastable.monitoring", "elastable.replicas.groups", "elastable.worker.readers"
)  # fmt: skip

_ON_TENSORFLOW = ("elastable.replicas", "elastable.worker.losses")


# What keras.Model's own methods do for models with tables in a store.
register_trainers(
    fit=lambda: import_module("elastable.in_process.model_methods").model_fit,
    train_on_batch=lambda: import_module("elastable.in_process.model_methods").model_train_on_batch,
)


# So that `keras.models.load_model` knows the layers, whichever of the two is imported first.
when_keras_is_imported(lambda: import_module("elastable.worker.layers.distributed_embedding"))


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("elastable.process.version").distribution_version()
    if name not in _HOMES:
        raise AttributeError(f"module 'elastable' has no attribute {name!r}; it has {', '.join(__all__)}")
    home = _HOMES[name]
    with needs(f"elastable.{name}", "replicas" if home.startswith("elastable.replicas") else None):
        if not home.startswith(_WITHOUT_KERAS):
            require_backend(f"elastable.{name}", on_any=not home.startswith(_ON_TENSORFLOW))
        value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
