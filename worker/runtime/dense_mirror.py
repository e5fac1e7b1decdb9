"""Copies the dense part of a version into the worker's model."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from elastable.embedding_store.errors import ModelError
from elastable.master.api import DenseSnapshot

__all__ = ["DenseMirror"]


class DenseMirror:
    """Writes snapshots into a model's variables and states.

    Args:
        variables: Variables of the job's optimizer, in model order.
        states: All other weights, in model order.
    """

    def __init__(self, variables: Sequence[keras.Variable], states: Sequence[keras.Variable]) -> None:
        variables = [*variables, *states]
        self._targets = [variable.value for variable in variables]
        self._paths = [variable.path for variable in variables]
        self._shapes = [tuple(target.shape) for target in self._targets]

    def assign(self, snapshot: DenseSnapshot) -> None:
        """Writes the snapshot into the model.

        Raises:
            ModelError: the master's model has different variables.
        """
        values = (*snapshot.variables, *snapshot.states)
        if [tuple(value.shape) for value in values] != self._shapes:
            theirs = [tuple(value.shape) for value in values]
            raise ModelError(
                f"the master's model differs from this worker's: its dense variables have shapes {theirs}, "
                f"here {dict(zip(self._paths, self._shapes, strict=True))}; run the same model file everywhere"
            )
        for target, value in zip(self._targets, values, strict=True):
            # A raw operation: all workers of a version wait for this, and the shapes are known to match.
            tf.raw_ops.AssignVariableOp(resource=target.handle, value=tf.convert_to_tensor(value, target.dtype))
