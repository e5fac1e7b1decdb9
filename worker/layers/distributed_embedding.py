"""`et.DistributedEmbedding`: many features and tables in one layer, compatible with keras-rs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import keras
import numpy as np

from elastable.embedding_store.contract.malformed import DocumentFields
from elastable.embedding_store.errors import BadIds, BadInput, BadSpec, Unsupported
from elastable.embedding_store.native.row_fold import COMBINERS
from elastable.master.backend.contract import BackendTensor, backend
from elastable.master.backend.lazy import tf
from elastable.worker.keras.structures import TensorLike, TensorStructure
from elastable.worker.layers.embedding import Embedding
from elastable.worker.readers.batch.pytrees import Structure
from elastable.worker.rows import array_calls
from elastable.worker.rows.id_values import (
    as_int64,
    flatten_ids,
    plain_ids,
    require_id_dtype,
    require_in_vocabulary,
    shape_rows,
)
from elastable.worker.rows.saved_rows import rows_in_memory
from elastable.worker.rows.scope import current_scope

_ByPart: TypeAlias = "dict[str, dict[str, TensorLike | None]]"
_Packed: TypeAlias = dict[str, dict[str, _ByPart]]

# keras-rs' own mark of inputs that `preprocess` has packed; there is one placement here.
_PREPROCESSED, _PLACEMENT = "preprocessed_inputs_per_placement", "default_device"


@dataclass(frozen=True, slots=True)
class _Feature:
    """A leaf of the configuration.

    Attributes:
        path: Its path in the structure, keys joined by dots.
        table: Index of its table in the layer.
        length: Length of its sequence; 0: it is reduced.
    """

    path: str
    table: int
    length: int
    config: FeatureConfig


@dataclass(frozen=True, slots=True)
class _Features:
    """The user's configuration, hidden from Keras' tracking, which would change its types.

    Attributes:
        leaves: Its structure with a `_Feature` for each description.
        tables: The tables, each once.
    """

    leaves: Structure[_Feature]
    tables: tuple[TableConfig, ...]


@keras.saving.register_keras_serializable(package="elastable")
class DistributedEmbedding(keras.layers.Layer):  # type: ignore[misc]
    """Looks up a structure of features in tables of an embedding store, and combines each feature's rows.

    Same arguments and outputs as `keras_rs.layers.DistributedEmbedding`: features of rank 1 become `[batch, dim]`; of
    features of rank 2 the last axis is reduced by the table's combiner. Features may share a table. Each table is a
    table of the model, by its name, and has its own optimizer.

    Args:
        feature_configs: A structure of `et.FeatureConfig` or `keras_rs.layers.FeatureConfig`.
        table_stacking: Accepted without effect: it lays tables out on accelerators.
        update_stats: Must be False; True belongs to keras-rs' JAX backend.

    Call arguments:
        inputs: Integer ids in the structure of `feature_configs`: dense, ragged or sparse; or the result of
            `preprocess`.
        weights: The weight of every id in its combination, in the same structure.
        training: Whether the call trains; see `keras.layers.Layer`.

    Returns:
        The structure of `feature_configs` with `[batch, dim]` for each feature, or `[batch, max_sequence_length, dim]`.

    Raises:
        BadSpec: an invalid description of a feature or table.
        Unsupported: `update_stats=True`.
        BadInput: inputs or weights of another structure.
    """

    def __init__(
        self,
        feature_configs: Structure[FeatureConfig],
        *,
        table_stacking: str | Sequence[str] | Sequence[Sequence[str]] | None = "auto",
        update_stats: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if update_stats:
            raise Unsupported(f"layer {self.name!r}: update_stats=True belongs to keras-rs' JAX backend: leave it out")
        self._features = _read(feature_configs)
        self._tables = [_table_layer(table) for table in self._features.tables]
        for number, table in enumerate(self._tables):  # TensorFlow's checkpoints do not look into lists
            setattr(self, f"table_{number}", table.table_in_checkpoint)
        # Ids are integers at every precision, and a lookup is no XLA operation.
        self.autocast = False
        self.supports_jit = False

    def build(self, input_shapes: object = None) -> None:
        """Checks the tables' specs; their rows are made when they are used."""
        for table in self._tables:
            table.build()
        self.built = True

    def __call__(self, inputs: TensorStructure, *args: object, **kwargs: object) -> Any:
        """Calls the layer; on arrays, ids keep their 64 bits."""
        outermost = current_scope() is None and any(isinstance(each, np.ndarray) for each in keras.tree.flatten(inputs))
        with backend().exact_ids() if outermost else nullcontext():
            return super().__call__(inputs, *args, **kwargs)

    def preprocess(
        self, inputs: TensorStructure, weights: TensorStructure | None = None, training: bool = False
    ) -> _Packed:
        """Inputs and weights as one structure, which `call` accepts as its inputs; optional."""
        packed = {"inputs": self._by_path("inputs", inputs)}
        if weights is not None:
            packed["weights"] = self._by_path("weights", weights)
        return {_PREPROCESSED: {_PLACEMENT: packed}}

    def call(
        self, inputs: TensorStructure, weights: TensorStructure | None = None, training: bool | None = None
    ) -> TensorStructure:
        """Combined rows of every feature; see the class."""
        packed = self._packed(inputs, weights)
        found, scales = packed["inputs"], packed.get("weights", {})

        def looked_up(feature: _Feature) -> tf.Tensor:
            table = self._tables[feature.table]
            return table(found[feature.path], scales.get(feature.path), length=feature.length, training=training)

        output: TensorStructure = keras.tree.map_structure(looked_up, self._features.leaves)
        return output

    def get_embedding_tables(self) -> dict[str, tf.Tensor]:
        """All rows of every table `[vocabulary_size, dim]`, by the table's name.

        Raises:
            Unsupported: a table of any int64 ids, or too large to be read in one go.
        """
        return {table.name: keras.ops.convert_to_tensor(rows_in_memory(table)) for table in self._tables}

    def compute_output_spec(
        self, inputs: TensorStructure, weights: TensorStructure | None = None, training: bool | None = None
    ) -> TensorStructure:
        """Symbolic output of symbolic ids."""
        found = self._packed(inputs, weights)["inputs"]

        def spec_of(feature: _Feature) -> keras.KerasTensor:
            return self._tables[feature.table].output_spec(found[feature.path], feature.length)

        output: TensorStructure = keras.tree.map_structure(spec_of, self._features.leaves)
        return output

    def get_config(self) -> dict[str, object]:
        """Everything needed to create the layer again, as in keras-rs: features refer to tables by index."""
        features = keras.tree.map_structure(_config_of_feature, self._features.leaves)
        return {
            **super().get_config(),
            "feature_configs": features,
            "tables": [_config_of_table(table) for table in self._features.tables],
        }

    @classmethod
    def from_config(cls, config: DocumentFields) -> DistributedEmbedding:
        """The layer from its config."""
        config = dict(config)
        tables = [TableConfig.from_config(table) for table in config.pop("tables")]

        def feature_of(part: object) -> FeatureConfig | None:
            if not (isinstance(part, dict) and isinstance(part.get("table"), int)):
                return None  # an inner node of the structure
            return FeatureConfig(**{**part, "table": tables[part["table"]]})

        config["feature_configs"] = keras.tree.traverse(feature_of, config["feature_configs"])
        return cls(**config)

    def _packed(self, inputs: TensorStructure, weights: TensorStructure | None) -> _ByPart:
        if isinstance(inputs, dict) and _PREPROCESSED in inputs:
            packed: _ByPart = inputs[_PREPROCESSED][_PLACEMENT]
            return packed
        return self.preprocess(inputs, weights)[_PREPROCESSED][_PLACEMENT]

    def _by_path(self, what: str, structure: TensorStructure) -> dict[str, TensorLike | None]:
        """Path -> its tensor."""
        tensors = _leaves_of(structure, self._features.leaves, f"layer {self.name!r}: {what}")
        made = plain_ids if what == "inputs" else lambda path, value: keras.ops.convert_to_tensor(value)
        return {
            feature.path: value if value is None or hasattr(value, "dtype") else made(feature.path, value)
            for feature, value in tensors
        }


def _leaves_of(
    structure: TensorStructure, features: Structure[_Feature], where: str
) -> Iterator[tuple[_Feature, TensorLike]]:
    """Each feature with its value; lists and tuples are equivalent, as in a saved model. Raises `BadInput`."""
    if isinstance(features, _Feature):
        yield features, structure
        return
    if isinstance(features, Mapping):
        if not isinstance(structure, Mapping) or set(structure) != set(features):
            named = isinstance(structure, Mapping)
            message = f"the keys {sorted(map(str, structure))}" if named else type(structure).__name__
            raise BadInput(f"{where}: feature_configs have the keys {sorted(map(str, features))}, got {message}")
        for key, part in features.items():
            yield from _leaves_of(structure[key], part, f"{where}[{key!r}]")
        return
    if not isinstance(structure, list | tuple) or len(structure) != len(features):
        message = f"{len(structure)}" if isinstance(structure, list | tuple) else type(structure).__name__
        raise BadInput(f"{where}: feature_configs have a list of {len(features)} features here, got {message}")
    for place, part in enumerate(features):
        yield from _leaves_of(structure[place], part, f"{where}[{place}]")


def _read(feature_configs: Structure[FeatureConfig]) -> _Features:
    tables: list[object] = []
    flat = []
    for keys, config in keras.tree.flatten_with_path(feature_configs):
        path = ".".join(str(key) for key in keys)
        _refuse_feature(path, config)
        # As in keras-rs it is the object that features share.
        place = next((place for place, table in enumerate(tables) if table is config.table), len(tables))
        if place == len(tables):
            tables.append(config.table)
        flat.append(_Feature(path, place, getattr(config, "max_sequence_length", 0), config))
    if not flat:
        raise BadSpec("feature_configs: there are no features; give an et.FeatureConfig, or a structure of them")
    described = tuple(map(_table_config, tables))
    names = [table.name for table in described]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadSpec(f"two tables have the name {twice!r}: features that share a table are given the same TableConfig")
    return _Features(keras.tree.pack_sequence_as(feature_configs, flat), described)


def _table_layer(table: TableConfig) -> TableFeatures:
    return TableFeatures(
        table.vocabulary_size,
        table.embedding_dim,
        embeddings_initializer=table.initializer,
        combiner=table.combiner,
        # keras-rs trains a table on the default device with the model's optimizer, and any other with the table's own.
        optimizer=None if table.placement == "default_device" else table.optimizer,
        name=table.name,
    )


def _config_of_feature(feature: _Feature) -> dict[str, object]:
    config = feature.config
    return {
        "name": config.name,
        "table": feature.table,
        "input_shape": getattr(config, "input_shape", None),
        "output_shape": getattr(config, "output_shape", None),
        "max_sequence_length": feature.length,
    }


# `et.TableConfig` and `et.FeatureConfig`, which describe the tables and features of `et.DistributedEmbedding`


_PLACEMENTS = ("auto", "default_device", "sparsecore")


@dataclass
class TableConfig:
    """One table; same arguments and defaults as `keras_rs.layers.TableConfig`.

    Attributes:
        name: Name of the table; unique in a model.
        vocabulary_size: Ids are `0 <= id < vocabulary_size`; None: any int64 id.
        embedding_dim: Columns of a row.
        initializer: Distribution of the rows, a Keras initializer or its name.
        optimizer: What trains the table: a Keras optimizer, its name or its config; None: the model's.
        combiner: "mean", "sum" or "sqrtn": how the last axis of the ids is reduced.
        placement: "auto" and "sparsecore": trained by `optimizer`; "default_device": by the model's optimizer, as
            keras-rs trains such a table. The job's `locations=` decides where the rows are stored.
        max_ids_per_partition, max_unique_ids_per_partition: For keras-rs' accelerators; not used.
    """

    name: str
    vocabulary_size: int | None
    embedding_dim: int
    initializer: keras.Initializer | str = field(
        default_factory=lambda: keras.initializers.VarianceScaling(mode="fan_out")
    )
    optimizer: keras.optimizers.Optimizer | str | dict[str, object] | None = "adam"
    combiner: str = "mean"
    placement: str = "auto"
    max_ids_per_partition: int = 256
    max_unique_ids_per_partition: int = 256

    @classmethod
    def from_config(cls, config: DocumentFields) -> TableConfig:
        """The inverse of `_config_of_table`."""
        return cls(
            **{
                **config,
                "initializer": keras.saving.deserialize_keras_object(config["initializer"]),
                "optimizer": keras.saving.deserialize_keras_object(config["optimizer"]),
            }
        )


@dataclass
class FeatureConfig:
    """One feature; same arguments as `keras_rs.layers.FeatureConfig`.

    Attributes:
        name: Of the feature, for messages.
        table: The table its ids are looked up in; features may share a table.
        input_shape: Shape of its ids, `(batch,)` or `(batch, n)`; for ragged ids n is the maximum. Documentation only:
            any batch size and n work.
        output_shape: Shape of its output, `(batch, embedding_dim)`; documentation only.
        max_sequence_length: If positive, ids `[batch, n]` are not reduced: the first that many give rows `[batch,
            max_sequence_length, embedding_dim]`, with zeros where there are fewer.
    """

    name: str
    table: TableConfig
    input_shape: Sequence[int | None] | None = None
    output_shape: Sequence[int | None] | None = None
    max_sequence_length: int = 0


def _refuse_feature(path: str, feature: object) -> None:
    """Raises `BadSpec` if a leaf of the configuration does not describe a feature."""
    table = getattr(feature, "table", None)
    missing = [name for name in ("name", "vocabulary_size", "embedding_dim") if not hasattr(table, name)]
    if missing:
        raise BadSpec(
            f"feature {path!r}: {type(feature).__name__} of {type(table).__name__} is no description of a feature "
            f"(its table has no {', '.join(missing)}): use et.FeatureConfig and et.TableConfig, or those of "
            "keras_rs.layers"
        )
    length = getattr(feature, "max_sequence_length", 0)
    if isinstance(length, bool) or not isinstance(length, int) or length < 0:
        raise BadSpec(f"feature {path!r}: max_sequence_length must be 0 or a positive integer, got {length!r}")


def _table_config(table: object) -> TableConfig:
    """A table description of any class as `et.TableConfig`; raises `BadSpec`."""
    said = {part.name: getattr(table, part.name) for part in fields(TableConfig) if hasattr(table, part.name)}
    own = TableConfig(**said)
    if own.combiner not in COMBINERS:
        raise BadSpec(f"table {own.name!r}: combiner {own.combiner!r}; known ones are {', '.join(COMBINERS)}")
    if own.placement not in _PLACEMENTS:
        raise BadSpec(f"table {own.name!r}: placement {own.placement!r}; known ones are {', '.join(_PLACEMENTS)}")
    return own


def _config_of_table(table: TableConfig) -> dict[str, object]:
    """The table as JSON values."""
    return {
        **{part.name: getattr(table, part.name) for part in fields(table)},
        "initializer": keras.saving.serialize_keras_object(table.initializer),
        "optimizer": keras.saving.serialize_keras_object(table.optimizer),
    }


# One table of an `et.DistributedEmbedding`: looks up and combines the ids of its features


class TableFeatures(Embedding):
    """The rows of one table for features of any rank; created by `et.DistributedEmbedding`.

    Like `keras_rs.layers.EmbedReduce`: ids of rank 1 are looked up, ids of higher rank are also reduced over the last
    axis, in float32.
    """

    def call(
        self, inputs: TensorLike, weights: TensorLike | None = None, training: bool | None = None, length: int = 0
    ) -> tf.Tensor | tf.RaggedTensor:
        """The output of one feature.

        Args:
            inputs: Integer ids: dense of any rank, ragged or sparse of rank 2.
            weights: Weight of each id in its combination, of the same kind and shape; None: 1.
            length: If positive, return a sequence of this length instead of a combination.

        Raises:
            BadIds: a sequence with weights, or with ids whose rank is not 2.
        """
        if not backend().has_graphs:
            return self._on_arrays(inputs, weights, training, length)
        if length:
            return self._sequence(inputs, weights, length, training)
        if inputs.shape.rank is not None and inputs.shape.rank < 2:
            return self._single(inputs, weights, training)
        return self.embed(inputs, weights, training)

    def output_spec(self, inputs: TensorLike, length: int) -> keras.KerasTensor:
        """Symbolic output of the symbolic ids of one feature."""
        kept = tuple(inputs.shape[:1]) if length else tuple(inputs.shape[:-1]) or tuple(inputs.shape)
        shape = (*kept, length, self.output_dim) if length else (*kept, self.output_dim)
        return keras.KerasTensor(shape, dtype=self.compute_dtype)

    def _on_arrays(
        self, ids: BackendTensor, weights: BackendTensor | None, training: bool | None, length: int
    ) -> BackendTensor:
        """`call` on JAX and PyTorch, of dense ids."""
        if length:
            self._require_sequence(ids, weights, length)
            rows = array_calls.rows_of(self, ids[:, :length], training)
            missing = length - rows.shape[1]
            return keras.ops.cast(keras.ops.pad(rows, ((0, 0), (0, missing), (0, 0))), self.compute_dtype)
        if len(ids.shape) >= 2:
            return self.embed(ids, weights, training)
        rows = array_calls.rows_of(self, ids, training)
        if weights is not None and self.combiner == "sum":
            rows = rows * keras.ops.cast(keras.ops.expand_dims(weights, -1), rows.dtype)
        return keras.ops.cast(rows, self.compute_dtype)

    def _require_sequence(self, ids: TensorLike, weights: TensorLike | None, length: int) -> None:
        if weights is not None or len(ids.shape) != 2:
            message = "weights" if weights is not None else f"ids of rank {len(ids.shape)}"
            raise BadIds(
                f"table {self.name!r}: a sequence (max_sequence_length={length}) takes ids of rank 2 and no weights, "
                f"got {message}"
            )

    def _single(self, ids: tf.Tensor, weights: TensorLike | None, training: bool | None) -> tf.Tensor:
        """The mean of one id is its row, whatever its weight; a sum applies the weight."""
        flat = flatten_ids(self.name, ids, None, None, False, self.input_dim, self.vocabulary_here())
        found = self.rows_of(flat.ids, training)
        self.add_penalty(flat.ids, found)
        rows = shape_rows(flat, found, None, self.output_dim)
        if weights is not None and self.combiner == "sum":
            rows *= tf.cast(tf.expand_dims(weights, -1), rows.dtype)
        return tf.cast(rows, self.compute_dtype)

    def _sequence(self, ids: TensorLike, weights: TensorLike | None, length: int, training: bool | None) -> tf.Tensor:
        self._require_sequence(ids, weights, length)
        sparse = _positions(ids, length)
        require_id_dtype(self.name, ids.dtype.name, self.input_dim)
        flat, vocabulary = as_int64(self.name, sparse.values, sparse), self.vocabulary_here()
        if vocabulary is not None:
            flat = require_in_vocabulary(self.name, flat, sparse, vocabulary)
        rows = self.rows_of(flat, training)
        self.add_penalty(flat, rows)
        shape = tf.stack([sparse.dense_shape[0], tf.constant(length, tf.int64), self.output_dim])
        placed = tf.scatter_nd(sparse.indices, rows, shape)
        placed.set_shape([ids.shape[0], length, self.output_dim])
        return tf.cast(placed, self.compute_dtype)


def _positions(ids: TensorLike, length: int) -> tf.SparseTensor:
    """The first `length` ids of each row as a sparse tensor `[batch, n]`."""
    if isinstance(ids, tf.RaggedTensor):
        sparse = ids.to_sparse()
    elif isinstance(ids, tf.SparseTensor):
        sparse = ids
    else:
        shape = tf.shape(ids, tf.int64)
        rows, columns = tf.meshgrid(tf.range(shape[0]), tf.range(shape[1]), indexing="ij")
        indices = tf.stack([tf.reshape(rows, [-1]), tf.reshape(columns, [-1])], axis=1)
        sparse = tf.SparseTensor(indices, tf.reshape(ids, [-1]), shape)
    return tf.sparse.retain(sparse, sparse.indices[:, 1] < length)
