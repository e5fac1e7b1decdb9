"""The worker's copy of the dense part of a version."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from embedding_store.errors import ModelError
from master.api import DenseSnapshot

__all__ = ["DenseMirror"]


class DenseMirror:
    """Writes snapshots into a model's variables and states, in model order."""

    def __init__(self, model: Any) -> None:
        self._variables = [variable.value for variable in model.trainable_weights]
        self._states = [variable.value for variable in model.non_trainable_weights]
        targets = [*self._variables, *self._states]
        self._paths = [v.path for v in (*model.trainable_weights, *model.non_trainable_weights)]

        def assign(*values: Any) -> None:
            for target, value in zip(targets, values, strict=True):
                target.assign(value)

        signature = [tf.TensorSpec(target.shape, target.dtype) for target in targets]
        self._assign = tf.function(assign, input_signature=signature) if targets else None
        self._shapes = [tuple(target.shape) for target in targets]

    def assign(self, snapshot: DenseSnapshot) -> None:
        """Makes the model's dense part that of the snapshot.

        Raises:
            ModelError: the master's model has other variables than this one.
        """
        values = (*snapshot.variables, *snapshot.states)
        if [tuple(value.shape) for value in values] != self._shapes:
            theirs = [tuple(value.shape) for value in values]
            raise ModelError(
                f"the master's model differs from this worker's: its dense variables have shapes {theirs}, "
                f"here {dict(zip(self._paths, self._shapes, strict=True))}; run the same model file everywhere"
            )
        if self._assign is not None:
            self._assign(*values)
