"""`et.TableConfig` and `et.FeatureConfig`, which describe the tables and features of `et.DistributedEmbedding`.

The classes of keras-rs work, too: only the attributes matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import keras

from elastable.embedding_store.contract.malformed import DocumentFields
from elastable.embedding_store.errors import BadSpec
from elastable.embedding_store.native.row_fold import COMBINERS

__all__ = ["PLACEMENTS", "FeatureConfig", "TableConfig", "config_of_table", "refuse_feature", "table_config"]

PLACEMENTS = ("auto", "default_device", "sparsecore")


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
        """The inverse of `config_of_table`."""
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


def refuse_feature(path: str, feature: object) -> None:
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


def table_config(table: object) -> TableConfig:
    """A table description of any class as `et.TableConfig`.

    Raises:
        BadSpec: a combiner or placement that keras-rs does not have.
    """
    said = {part.name: getattr(table, part.name) for part in fields(TableConfig) if hasattr(table, part.name)}
    own = TableConfig(**said)
    if own.combiner not in COMBINERS:
        raise BadSpec(f"table {own.name!r}: combiner {own.combiner!r}; known ones are {', '.join(COMBINERS)}")
    if own.placement not in PLACEMENTS:
        raise BadSpec(f"table {own.name!r}: placement {own.placement!r}; known ones are {', '.join(PLACEMENTS)}")
    return own


def config_of_table(table: TableConfig) -> dict[str, object]:
    """The table as JSON values."""
    return {
        **{part.name: getattr(table, part.name) for part in fields(table)},
        "initializer": keras.saving.serialize_keras_object(table.initializer),
        "optimizer": keras.saving.serialize_keras_object(table.optimizer),
    }
