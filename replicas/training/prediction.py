"""Predictions of all records; each replica computes a part."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from elastable.embedding_store.contract.arrays import Array, Int64
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.training.step import PredictStep
from elastable.replicas.training.variables.split import VariableSplit
from elastable.worker.models.build import as_tensors
from elastable.worker.readers import Reader
from elastable.worker.readers.records.pytrees import Structure

__all__ = ["predict_all"]


def predict_all(
    model: keras.Model, step: PredictStep, reader: Reader, batch_size: int, group: ReplicaGroup
) -> Structure[Array]:
    """The outputs of all records, in their order, on every replica; each calls it.

    Args:
        model: The model.
        step: This replica's.
        reader: The same records on every replica.
        batch_size: Most records that a replica computes at once.
        group: All replicas.
    """
    split = VariableSplit(len(reader), group.size)
    mine = np.arange(*split.bounds(group.rank))
    # As many calls on every replica, as a call may be a collective lookup: without records, it takes the first.
    outputs = [_outputs(model, step, reader, part) for part in np.array_split(mine, -(-split.length // batch_size))]
    joined = tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *outputs)
    found: Structure[Array] = tf.nest.map_structure(
        lambda array: np.concatenate(group.all_gather_uneven(array)), joined
    )
    return found


def _outputs(model: keras.Model, step: PredictStep, reader: Reader, indices: Int64) -> Structure[Array]:
    taken = indices if len(indices) else np.zeros(1, np.int64)
    outputs: Structure[Array] = tf.nest.map_structure(
        lambda array: array[: len(indices)],
        step(as_tensors(reader.take(taken)[:1], f"{type(reader).__name__}.take()", model, taken)),
    )
    return outputs
