"""`et.DistributedEmbedding`: many features and tables in one layer, compatible with keras-rs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from elastable.embedding_store.contract.malformed import DocumentFields
from elastable.embedding_store.errors import BadInput, BadSpec, Unsupported
from elastable.worker.keras.structures import TensorLike, TensorStructure
from elastable.worker.layers.feature_configs import (
    FeatureConfig,
    TableConfig,
    config_of_table,
    refuse_feature,
    table_config,
)
from elastable.worker.layers.table_features import TableFeatures
from elastable.worker.readers.records.pytrees import Structure
from elastable.worker.rows.id_values import plain_ids
from elastable.worker.rows.saved_rows import rows_in_memory

__all__ = ["DistributedEmbedding"]

_ByPart: TypeAlias = "dict[str, dict[str, TensorLike | None]]"
_Packed: TypeAlias = dict[str, dict[str, _ByPart]]

# keras-rs' own mark of inputs that `preprocess` has packed; there is one placement here.
_PREPROCESSED, _PLACEMENT = "preprocessed_inputs_per_placement", "default_device"
_BLOCK_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class _Feature:
    """A leaf of the configuration.

    Attributes:
        path: Its path in the structure, keys joined by dots.
        table: Index of its table in the layer.
        length: Length of its sequence; 0: it is reduced.
        config: The user's description.
    """

    path: str
    table: int
    length: int
    config: FeatureConfig


@dataclass(frozen=True, slots=True)
class _Features:
    """The user's configuration, hidden from Keras' tracking, which would change its types.

    Attributes:
        configs: The user's structure.
        leaves: The same structure with a `_Feature` for each description.
        flat: The leaves in the order of the structure.
        tables: The tables, each once.
    """

    configs: Structure[FeatureConfig]
    leaves: Structure[_Feature]
    flat: tuple[_Feature, ...]
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
        training: As in Keras.

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
        return {table.name: tf.convert_to_tensor(rows_in_memory(table)) for table in self._tables}

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
            "tables": [config_of_table(table) for table in self._features.tables],
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
        made = plain_ids if what == "inputs" else lambda path, value: tf.convert_to_tensor(value)
        return {
            feature.path: value if value is None or hasattr(value, "dtype") else made(feature.path, value)
            for feature, value in tensors
        }


def _leaves_of(
    structure: TensorStructure, features: Structure[_Feature], where: str
) -> Iterator[tuple[_Feature, TensorLike]]:
    """Each feature with its value; lists and tuples are equivalent, as in a saved model.

    Raises:
        BadInput: names where the structures differ.
    """
    if isinstance(features, _Feature):
        yield features, structure
        return
    if isinstance(features, Mapping):
        if not isinstance(structure, Mapping) or set(structure) != set(features):
            message = (
                f"the keys {sorted(map(str, structure))}"
                if isinstance(structure, Mapping)
                else type(structure).__name__
            )
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
        refuse_feature(path, config)
        # As in keras-rs it is the object that features share.
        place = next((place for place, table in enumerate(tables) if table is config.table), len(tables))
        if place == len(tables):
            tables.append(config.table)
        flat.append(_Feature(path, place, getattr(config, "max_sequence_length", 0), config))
    if not flat:
        raise BadSpec("feature_configs: there are no features; give an et.FeatureConfig, or a structure of them")
    described = tuple(map(table_config, tables))
    names = [table.name for table in described]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadSpec(f"two tables have the name {twice!r}: features that share a table are given the same TableConfig")
    leaves = keras.tree.pack_sequence_as(feature_configs, flat)
    return _Features(feature_configs, leaves, tuple(flat), described)


def _table_layer(table: TableConfig) -> TableFeatures:
    # keras-rs trains a table on the default device with the model's optimizer, and any other with the table's own.
    own = None if table.placement == "default_device" else table.optimizer
    return TableFeatures(
        table.vocabulary_size,
        table.embedding_dim,
        embeddings_initializer=table.initializer,
        combiner=table.combiner,
        optimizer=own,
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
