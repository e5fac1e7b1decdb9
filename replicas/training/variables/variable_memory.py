"""The memory of a Keras variable: read without a copy, replaced, given back, counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from elastable.replicas.groups.group import Array

__all__ = ["give_back", "held_bytes", "put", "value_of"]


def value_of(variable: Any) -> Array:
    """The variable's values, read-only."""
    value = variable.value
    # Nothing is copied: TensorFlow copies a buffer that somebody holds, when it is changed.
    array: Array = np.asarray(tf.raw_ops.ReadVariableOp(resource=value.handle, dtype=value.dtype))
    view = array.view()
    view.setflags(write=False)
    return view


def put(variable: Any, array: Array) -> None:
    """Replaces the variable's values; also of one whose memory was given back.

    Args:
        variable: A Keras variable.
        array: Of as many elements.
    """
    value = variable.value
    tensor = tf.convert_to_tensor(array.reshape(tuple(variable.shape)), value.dtype)
    tf.raw_ops.AssignVariableOp(resource=value.handle, value=tensor, validate_shape=False)


def give_back(variable: Any) -> None:
    """Frees the memory of a variable: it holds no values until the next `put`, and must not be read."""
    value = variable.value
    nothing = tf.zeros([0], value.dtype)
    # The shape that graphs know stays; only what the handle points at becomes empty.
    tf.raw_ops.AssignVariableOp(resource=value.handle, value=nothing, validate_shape=False)


def held_bytes(variable: Any) -> int:
    """Bytes that the variable's values take now, measured on its buffer."""
    return int(value_of(variable).nbytes)
