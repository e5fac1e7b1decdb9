"""Pytrees of tensors and arrays: what Keras models take and give."""

from __future__ import annotations

from typing import TypeAlias

import tensorflow as tf

from elastable.replicas.groups.group import Array

__all__ = ["ArrayTree", "TensorTree"]

TensorTree: TypeAlias = tf.Tensor | tuple["TensorTree", ...] | list["TensorTree"] | dict[str, "TensorTree"]
ArrayTree: TypeAlias = Array | tuple["ArrayTree", ...] | list["ArrayTree"] | dict[str, "ArrayTree"]
