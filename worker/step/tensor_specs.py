"""Signatures of batches: one trace serves every batch size and every raggedness."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

__all__ = ["batch_spec", "flat_spec", "pack_flat", "records_in"]


def batch_spec(batch: Any) -> Any:
    """The TypeSpecs of a nest of tensors, with the first axis left open."""

    def open_first_axis(value: Any) -> Any:
        if isinstance(value, tf.RaggedTensor):
            shape = tf.TensorShape([None, *value.shape[1:]])
            return tf.RaggedTensorSpec(shape, value.dtype, value.ragged_rank, value.row_splits.dtype)
        if isinstance(value, tf.SparseTensor):
            return tf.SparseTensorSpec([None] * value.shape.rank, value.dtype)
        tensor = tf.convert_to_tensor(value)
        return tf.TensorSpec([None, *tensor.shape[1:]] if tensor.shape.rank else [], tensor.dtype)

    return tf.nest.map_structure(open_first_axis, batch)


def flat_spec(spec: Any) -> list[Any]:
    """The plain TensorSpecs that a nest of TypeSpecs consists of."""
    return list(tf.nest.flatten(spec, expand_composites=True))


def pack_flat(spec: Any, tensors: Any) -> Any:
    """The nest that `spec` describes, of plain tensors in `flat_spec`'s order."""
    return tf.nest.pack_sequence_as(spec, list(tensors), expand_composites=True)


def records_in(nest: Any) -> Any:
    """int32 scalar: the length of the first axis of a nest of tensors, whose parts may be ragged or sparse."""
    first = tf.nest.flatten(nest)[0]
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int32)
    if isinstance(first, tf.SparseTensor):
        return tf.cast(first.dense_shape[0], tf.int32)
    return tf.shape(first)[0]
