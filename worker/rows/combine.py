"""Flattens the ids of a call, and shapes flat rows into the call's output."""

from __future__ import annotations

from dataclasses import dataclass, replace

import tensorflow as tf

from elastable.embedding_store.errors import BadIds, BadSpec
from elastable.embedding_store.native.row_fold import COMBINERS
from elastable.worker.keras.structures import TensorLike
from elastable.worker.rows.id_values import as_int64, refuse_weights_unlike, require_id_dtype, require_in_vocabulary

__all__ = ["FlatIds", "flatten_ids", "shape_rows"]


@dataclass(frozen=True, slots=True)
class FlatIds:
    """The flattened ids of a call, with what is needed to shape its output.

    Attributes:
        ids: int64 `[n]`.
        source: The original tensor (dense or ragged), or the sparse tensor without its pruned entries.
        weights: `[n]` or None: weight of each id in its combination.
    """

    ids: tf.Tensor
    source: TensorLike
    weights: tf.Tensor | None


def flatten_ids(
    layer: str,
    inputs: TensorLike,
    weights: TensorLike | None,
    combiner: str | None,
    mask_zero: bool,
    input_dim: int | None = None,
    vocabulary: int | None = None,
) -> FlatIds:
    """Flattens the ids of one call of the layer named `layer`.

    Sparse integers below 0 are pruned, as in `tf.nn.safe_embedding_lookup_sparse`. Under `mask_zero` a combiner skips
    id 0, or the empty string. With `vocabulary` ids are looked at here, because nobody does so behind.

    Raises:
        BadIds: ids that are neither integers nor strings, strings for a fixed vocabulary (`input_dim`), or weights that
            do not match the ids or have no combiner.
        IdOutOfRange: an id that is not below `vocabulary`.
        BadSpec: sparse ids without a combiner.
    """
    require_id_dtype(layer, inputs.dtype.name, input_dim)
    if weights is not None and combiner is None:
        raise BadIds(f"embedding layer {layer!r}: weights need a combiner ({', '.join(COMBINERS)})")
    if weights is not None:
        refuse_weights_unlike(layer, inputs, weights)
    if isinstance(inputs, tf.SparseTensor):
        if combiner is None:
            raise BadSpec(f"embedding layer {layer!r}: sparse ids need a combiner ({', '.join(COMBINERS)})")
        flat = _flatten_sparse(layer, inputs, weights, mask_zero)
    else:
        flat = _flatten_dense(layer, inputs, weights, combiner, mask_zero)
    if vocabulary is None:
        return flat
    return replace(flat, ids=require_in_vocabulary(layer, flat.ids, flat.source, vocabulary))


def _flatten_dense(
    layer: str, inputs: TensorLike, weights: TensorLike | None, combiner: str | None, mask_zero: bool
) -> FlatIds:
    """Flattens dense or ragged ids."""
    values = _flat(inputs)
    flat_weights = None if weights is None else tf.cast(_flat(weights), tf.float32)
    if combiner is not None and mask_zero:
        kept = tf.cast(_is_kept(values, mask_zero), tf.float32)
        flat_weights = kept if flat_weights is None else flat_weights * kept
    return FlatIds(as_int64(layer, values, inputs), inputs, flat_weights)


def _is_kept(values: tf.Tensor, mask_zero: bool) -> tf.Tensor:
    """Whether each id is not padding (0, or the empty string)."""
    if values.dtype == tf.string:
        return tf.not_equal(values, "") if mask_zero else tf.ones_like(values, tf.bool)
    return tf.not_equal(values, tf.zeros([], values.dtype))


def _flat(values: TensorLike) -> tf.Tensor:
    return values.flat_values if isinstance(values, tf.RaggedTensor) else tf.reshape(values, [-1])


def _flatten_sparse(layer: str, inputs: TensorLike, weights: TensorLike | None, mask_zero: bool) -> FlatIds:
    ids = as_int64(layer, inputs.values, inputs)
    # Half of all string hashes are below 0.
    pruned = ids > 0 if mask_zero else ids >= 0
    kept = _is_kept(inputs.values, mask_zero) if inputs.dtype == tf.string else pruned
    source = tf.sparse.retain(inputs, kept)
    values = None
    if weights is not None:
        flat = weights.values if isinstance(weights, tf.SparseTensor) else weights
        values = tf.boolean_mask(tf.cast(flat, tf.float32), kept)
    return FlatIds(tf.boolean_mask(ids, kept), source, values)


def shape_rows(flat: FlatIds, rows: tf.Tensor, combiner: str | None, dim: int) -> tf.Tensor | tf.RaggedTensor:
    """The output of a call from its flat rows.

    Args:
        flat: The result of `flatten_ids`.
        rows: float32 `[n, dim]`.
        combiner: How the last axis of the ids is reduced; None: not at all.
        dim: Columns.

    Returns:
        Without a combiner ids' shape + `[dim]` (ragged for ragged ids); with one, ids' shape without its last axis +
        `[dim]`. No ids give zeros.
    """
    source = flat.source
    if combiner is None:
        if isinstance(source, tf.RaggedTensor):
            return source.with_flat_values(rows)
        static = source.shape
        shaped = tf.reshape(rows, tf.concat([tf.shape(source), [dim]], axis=0))
        shaped.set_shape([*static, dim] if static.rank is not None else None)
        return shaped
    if isinstance(source, tf.SparseTensor):
        count = source.dense_shape[0]
        return _combine_segments(rows, source.indices[:, 0], count, flat.weights, combiner)
    if isinstance(source, tf.RaggedTensor):
        return _combine_ragged(flat, rows, combiner)
    return _combine_dense(flat, rows, combiner, dim)


def _combine_ragged(flat: FlatIds, rows: tf.Tensor, combiner: str) -> tf.Tensor | tf.RaggedTensor:
    # The innermost ragged axis is the one that is combined.
    innermost, splits = flat.source, []
    while isinstance(innermost.values, tf.RaggedTensor):
        splits.append(innermost.row_splits)
        innermost = innermost.values
    combined = _combine_segments(rows, innermost.value_rowids(), innermost.nrows(), flat.weights, combiner)
    return tf.RaggedTensor.from_nested_row_splits(combined, splits) if splits else combined


def _combine_segments(
    rows: tf.Tensor, segments: tf.Tensor, count: tf.Tensor, weights: tf.Tensor | None, combiner: str
) -> tf.Tensor:
    count = tf.cast(count, tf.int64)
    segments = tf.cast(segments, tf.int64)
    weighted = rows if weights is None else rows * weights[:, tf.newaxis]
    total = tf.math.unsorted_segment_sum(weighted, segments, count)
    if combiner == "sum":
        return total
    ones = tf.ones([tf.shape(rows)[0]]) if weights is None else weights
    norm = tf.math.unsorted_segment_sum(ones if combiner == "mean" else ones * ones, segments, count)
    return _divided(total, norm[:, tf.newaxis], combiner)


def _combine_dense(flat: FlatIds, rows: tf.Tensor, combiner: str, dim: int) -> tf.Tensor:
    source = flat.source
    shape = tf.shape(source)
    shaped = tf.reshape(rows, tf.concat([shape, [dim]], axis=0))
    weights = None if flat.weights is None else tf.reshape(flat.weights, shape)
    if weights is not None:
        shaped = shaped * weights[..., tf.newaxis]
    total = tf.reduce_sum(shaped, axis=-2)
    if source.shape.rank is not None:
        total.set_shape([*source.shape[:-1], dim])
    if combiner == "sum":
        return total
    if weights is None:
        return _divided(total, tf.cast(shape[-1], tf.float32), combiner)
    norm = tf.reduce_sum(weights if combiner == "mean" else weights * weights, axis=-1, keepdims=True)
    return _divided(total, norm, combiner)


def _divided(total: tf.Tensor, norm: tf.Tensor, combiner: str) -> tf.Tensor:
    return tf.math.divide_no_nan(total, norm if combiner == "mean" else tf.sqrt(norm))
