"""Predictions of all records, each replica a part of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.training.step import PredictStep
from elastable.replicas.training.variables.split import VariableSplit
from elastable.worker.models.build import as_tensors
from elastable.worker.readers import Reader

__all__ = ["predict_all"]


def predict_all(step: PredictStep, reader: Reader, batch_size: int, group: ReplicaGroup) -> Any:
    """The outputs of all records, in their order, on every replica; each calls it.

    Args:
        step: This replica's.
        reader: The same records on every replica.
        batch_size: Records that a replica computes at once, at most.
        group: All replicas.
    """
    split = VariableSplit(len(reader), group.size)
    mine = np.arange(*split.bounds(group.rank))
    # Equally many calls on every replica, as a call may look up together: one without records takes the first.
    outputs = [_outputs(step, reader, part) for part in np.array_split(mine, -(-split.length // batch_size))]
    joined = tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *outputs)
    return tf.nest.map_structure(lambda array: np.concatenate(group.all_gather_uneven(array)), joined)


def _outputs(step: PredictStep, reader: Reader, indices: Any) -> Any:
    taken = indices if len(indices) else np.zeros(1, np.int64)
    found = step(as_tensors(reader.take(taken)[:1]))
    return tf.nest.map_structure(lambda array: array[: len(indices)], found)
