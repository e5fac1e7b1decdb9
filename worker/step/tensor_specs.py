"""Signatures of batches: one trace serves all batch sizes and row lengths."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from elastable.worker.keras.structures import BatchSpec, TensorBatch, TensorLike, TensorStructure

__all__ = ["batch_spec", "flat_spec", "pack_flat", "records_in"]


def batch_spec(batch: TensorBatch) -> BatchSpec:
    """The TypeSpecs of a batch, with an open first axis."""

    def open_first_axis(value: TensorLike) -> tf.TypeSpec:
        if isinstance(value, tf.RaggedTensor):
            shape = tf.TensorShape([None, *value.shape[1:]])
            return tf.RaggedTensorSpec(shape, value.dtype, value.ragged_rank, value.row_splits.dtype)
        if isinstance(value, tf.SparseTensor):
            return tf.SparseTensorSpec([None] * value.shape.rank, value.dtype)
        tensor = tf.convert_to_tensor(value)
        return tf.TensorSpec([None, *tensor.shape[1:]] if tensor.shape.rank else [], tensor.dtype)

    spec: BatchSpec = tf.nest.map_structure(open_first_axis, batch)
    return spec


def flat_spec(spec: BatchSpec) -> list[tf.TensorSpec]:
    """The TensorSpecs of the components of a structure of TypeSpecs."""
    return list(tf.nest.flatten(spec, expand_composites=True))


def pack_flat(spec: BatchSpec, tensors: Iterable[tf.Tensor]) -> TensorBatch:
    """The structure that `spec` describes, from component tensors in `flat_spec`'s order."""
    batch: TensorBatch = tf.nest.pack_sequence_as(spec, list(tensors), expand_composites=True)
    return batch


def records_in(structure: TensorStructure) -> tf.Tensor:
    """int32 scalar: the length of the first axis of a structure of dense, ragged or sparse tensors."""
    first = tf.nest.flatten(structure)[0]
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int32)
    if isinstance(first, tf.SparseTensor):
        return tf.cast(first.dense_shape[0], tf.int32)
    return tf.shape(first)[0]
