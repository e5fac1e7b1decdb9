"""A model's states besides its weights, such as moving statistics: averaged over replicas after each step."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np

from elastable.embedding_store.contract.arrays import Array
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.training.variables.variable_memory import put, value_of
from elastable.worker.keras.seeds import layers_of

__all__ = ["ReplicaStates", "model_states"]


def model_states(model: keras.Model) -> list[keras.Variable]:
    """Variables that layers update in the forward pass: no frozen weights, and no seeds, which follow the step."""
    layers = layers_of(model)
    found = [variable for layer in layers for variable in getattr(layer, "_non_trainable_variables", ())]
    unique = {id(variable): variable for variable in found if variable.name != "seed_generator_state"}
    return list(unique.values())


class ReplicaStates:
    """The states of a built model over replicas.

    After every step a state becomes the mean of the replicas' values, weighted
    by their records, as `tf.distribute` aggregates the moving statistics of
    BatchNormalization; integers become rank 0's. Equal values stay equal to the bit.
    """

    def __init__(self, model: keras.Model, group: ReplicaGroup) -> None:
        self._group = group
        self._variables = model_states(model) if group.size > 1 else []

    def share(self, shares: Sequence[float]) -> None:
        """Averages the states; every replica calls it. `shares`: each rank's part of the batch's records."""
        values = [value_of(variable) for variable in self._variables]
        for dtype in dict.fromkeys(value.dtype for value in values):
            places = [place for place, value in enumerate(values) if value.dtype == dtype]
            rows = self._group.all_gather(np.concatenate([values[place].reshape(-1) for place in places]))
            if all(row.tobytes() == rows[0].tobytes() for row in rows[1:]):
                continue
            mean, first = _mean(rows, shares), 0
            for place in places:
                size = values[place].size
                put(self._variables[place], mean[first : first + size])
                first += size


def _mean(rows: Array, shares: Sequence[float]) -> Array:
    first: Array = rows[0]
    if rows.dtype.kind in "iub":
        return first
    total: Array = first * rows.dtype.type(shares[0])
    for row, share in zip(rows[1:], shares[1:], strict=True):
        total += row * row.dtype.type(share)
    same = (rows == first).all(axis=0)
    total[same] = first[same]
    return total
