"""The memory of a Keras variable: read without a copy, replaced, freed, counted."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from elastable.embedding_store.contract.arrays import Array

__all__ = ["give_back", "held_bytes", "put", "value_of"]


def value_of(variable: keras.Variable) -> Array:
    """The variable's values, read-only."""
    value = variable.value
    # No copy: TensorFlow copies a shared buffer only when it changes.
    array: Array = np.asarray(tf.raw_ops.ReadVariableOp(resource=value.handle, dtype=value.dtype))
    view = array.view()
    view.setflags(write=False)
    return view


def put(variable: keras.Variable, array: Array) -> None:
    """Replaces the values of a variable, which may have been freed, with as many elements."""
    value = variable.value
    tensor = tf.convert_to_tensor(array.reshape(tuple(variable.shape)), value.dtype)
    tf.raw_ops.AssignVariableOp(resource=value.handle, value=tensor, validate_shape=False)


def give_back(variable: keras.Variable) -> None:
    """Frees a variable's memory; it must not be read until the next `put`."""
    value = variable.value
    nothing = tf.zeros([0], value.dtype)
    # Graphs keep the static shape; only the resource behind the handle becomes empty.
    tf.raw_ops.AssignVariableOp(resource=value.handle, value=nothing, validate_shape=False)


def held_bytes(variable: keras.Variable) -> int:
    """Bytes of the variable's values now, measured on its buffer."""
    return int(value_of(variable).nbytes)
