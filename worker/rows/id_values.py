"""The ids of a call: converted to int64, checked, flattened; and flat rows shaped into its output."""

from __future__ import annotations

from dataclasses import dataclass, replace

import keras
import numpy as np
import numpy.typing as npt

from elastable.embedding_store.errors import BadIds, BadSpec, IdOutOfRange
from elastable.embedding_store.native.row_fold import COMBINERS
from elastable.embedding_store.tables.checks import as_ids
from elastable.master.backend.contract import backend
from elastable.master.backend.lazy import tf
from elastable.worker.keras.structures import TensorLike

BELONGS = "the input takes {}"
_LARGEST = "is above 2**63 - 1, the largest id of a table; view ids as int64, or hash them (et.hash_ids)"
EXACT_BITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
"""Dtype -> b: it holds every integer below 2**b in size."""


def require_id_dtype(layer: str, dtype: str, input_dim: int | None) -> None:
    """Refuses inputs whose dtype, by Keras' name, cannot be ids of a vocabulary (None: any id).

    Raises:
        BadIds: booleans, floats that cannot hold every id of the vocabulary, or strings for a fixed vocabulary.
    """
    if dtype == "string" and input_dim is not None:
        raise BadIds(
            f"embedding layer {layer!r}: called on strings, and input_dim={input_dim} says that ids are integers below "
            f"it; put keras.layers.StringLookup or keras.layers.Hashing(num_bins={input_dim}) in front of it, or use "
            "input_dim=None, with which strings are hashed to ids of 64 bits (et.hash_ids)"
        )
    if dtype in EXACT_BITS and (input_dim is None or input_dim <= 2 ** EXACT_BITS[dtype]):
        return
    if dtype in EXACT_BITS:
        raise BadIds(
            f"embedding layer {layer!r}: {dtype} holds every integer only below 2**{EXACT_BITS[dtype]}, and "
            f'input_dim={input_dim} has more; declare the input as keras.Input(..., dtype="int64")'
        )
    if dtype != "string" and "int" not in dtype:
        raise BadIds(
            f"embedding layer {layer!r}: ids must be integers or strings, got {dtype}; "
            'declare the input as keras.Input(..., dtype="int64") or dtype="string"'
        )


def as_int64(layer: str, values: tf.Tensor, source: TensorLike) -> tf.Tensor:
    """int64 `[n]` ids of a flat tensor of integers, floats or strings.

    Strings become their FarmHash `Fingerprint64`, as `elastable.embedding_store.native.string_ids` says.

    Args:
        layer: Name of the layer, for messages.
        values: `[n]`.
        source: The tensor that was flattened, dense, ragged or sparse.

    Raises:
        BadIds: a float that is no integer, or that its dtype may have rounded, or a uint64 above 2**63 - 1, in eager
            mode. A graph raises `tf.errors.InvalidArgumentError` when it runs.
    """
    if values.dtype == tf.string:
        return tf.bitcast(tf.fingerprint(values), tf.int64)
    where = f"embedding layer {layer!r}: id"
    if values.dtype == tf.uint64:
        ids = tf.bitcast(values, tf.int64)  # larger values have become negative
        return _unless(ids < 0, ids, values, source, where, _LARGEST)
    if not values.dtype.is_floating:
        return tf.cast(values, tf.int64)
    return _unless(_inexact(values), tf.cast(values, tf.int64), values, source, where, _why_inexact(values))


def plain_ids(layer: str, values: npt.ArrayLike) -> tf.Tensor:
    """A number, or lists or objects of numbers or strings, as a tensor; raises `BadIds` for anything else."""
    if not backend().has_graphs:
        return keras.ops.convert_to_tensor(as_ids(values, layer))
    if isinstance(values, list | tuple) and any(tf.is_tensor(value) for value in values):
        return tf.stack(values)
    try:
        found = np.asarray(values)
    except ValueError as error:
        raise BadIds(
            f"embedding layer {layer!r}: lists of different lengths: make them a tf.ragged.constant ({error})"
        ) from error
    if found.dtype.kind in "SU" or (
        found.dtype == object and all(isinstance(each, str | bytes) for each in found.flat)
    ):
        return tf.constant(found, tf.string)
    return tf.constant(as_ids(values, layer))


def called(name: str) -> str:
    """What errors call an input of a model; a name that Keras made up says nothing."""
    return "an unnamed input" if name.startswith("keras_tensor") else f"input {name!r}"


def exact_tensor(value: TensorLike, name: str, dtype: str) -> TensorLike:
    """What an input of an integer dtype is given: floats as int64, if they are integers; others as they are.

    Raises:
        BadIds: a value that the input cannot hold, in eager mode. A graph raises `tf.errors.InvalidArgumentError`.
    """
    limits, given, where = tf.as_dtype(dtype), value.dtype, f"{called(name)}:"
    narrow = given.is_integer and (given.min < limits.min or given.max > limits.max)
    if not given.is_floating and not narrow:
        return value
    values = value.values if isinstance(value, tf.SparseTensor) else getattr(value, "flat_values", value)
    flat = tf.reshape(values, [-1])
    if given.is_floating:
        reason = f"{_why_inexact(flat)}; {BELONGS.format(dtype)}"
        flat = _unless(_inexact(flat), tf.cast(flat, tf.int64), flat, value, where, reason)
    low, high = max(limits.min, flat.dtype.min), min(limits.max, flat.dtype.max)
    flat = _unless((flat < low) | (flat > high), flat, flat, value, where, f"is no {dtype}; {BELONGS.format(dtype)}")
    exact = tf.reshape(flat, tf.shape(values))
    exact.set_shape(values.shape)
    if isinstance(value, tf.SparseTensor):
        return tf.SparseTensor(value.indices, exact, value.dense_shape)
    return value.with_flat_values(exact) if isinstance(value, tf.RaggedTensor) else exact


def require_in_vocabulary(layer: str, ids: tf.Tensor, source: TensorLike, input_dim: int) -> tf.Tensor:
    """The int64 `[n]` ids, once they are known to be `0 <= id < input_dim`; other arguments as of `as_int64`.

    Raises:
        IdOutOfRange: an id outside, in eager mode. A graph raises `tf.errors.InvalidArgumentError` when it runs.
    """
    outside, reason = (ids < 0) | (ids >= input_dim), f"is outside 0 <= id < {input_dim}"
    return _unless(outside, ids, ids, source, f"embedding layer {layer!r}: id", reason, IdOutOfRange)


def assertion_of(error: tf.errors.OpError) -> str | None:
    """What an assertion of this module said, without the trace of its creation; None: it is another error."""
    for line in str(error.message).splitlines():
        _, found, message = line.partition("assertion failed: [")
        if found:
            return message.rpartition("]")[0].replace("\\'", "'")
    return None


def _inexact(values: tf.Tensor) -> tf.Tensor:
    exact = tf.cast(2.0 ** EXACT_BITS[values.dtype.name], values.dtype)
    return ~((tf.abs(values) < exact) & (tf.floor(values) == values))  # NaN is neither


def _why_inexact(values: tf.Tensor) -> str:
    kind = values.dtype.name
    return f"is no integer below 2**{EXACT_BITS[kind]}, up to which {kind} holds every one; give ids as int64"


def _unless(
    wrong: tf.Tensor,
    ids: tf.Tensor,
    values: tf.Tensor,
    source: TensorLike,
    where: str,
    reason: str,
    error: type[BadIds] = BadIds,
) -> tf.Tensor:
    """The ids; where one is `wrong`, an error with its value and record."""
    first = tf.where(wrong)[:1, 0]
    if tf.executing_eagerly():
        if len(first):
            value, record = values[first[0]].numpy(), int(_record_of(source, first)[0])
            raise error(f"{where} {value} of record {record} of the batch {reason}")
        return ids
    value = tf.gather(values, first)
    if values.dtype.is_floating:
        value = tf.strings.as_string(tf.cast(value, tf.float64), precision=9, shortest=True)
    else:
        value = tf.strings.as_string(value)
    record = tf.strings.as_string(_record_of(source, first))
    parts = [
        f"{where} ",
        tf.strings.reduce_join(value),
        " of record ",
        tf.strings.reduce_join(record),
        f" of the batch {reason}",
    ]
    with tf.control_dependencies([tf.debugging.Assert(~tf.reduce_any(wrong), [tf.strings.join(parts)])]):
        return tf.identity(ids)


def _record_of(source: TensorLike, positions: tf.Tensor) -> tf.Tensor:
    """int64 `[n]`: the record (place on the first axis) of each of int64 `[n]` positions among the flat values."""
    if isinstance(source, tf.SparseTensor):
        return tf.gather(source.indices[:, 0], positions)
    if isinstance(source, tf.RaggedTensor):
        positions = _record_of(source.values, positions)
        splits = tf.cast(source.row_splits, tf.int64)
        return tf.searchsorted(splits, positions, side="right", out_type=tf.int64) - 1
    if source.shape.rank == 0:
        return positions
    return positions // tf.maximum(tf.reduce_prod(tf.shape(source, tf.int64)[1:]), 1)


def refuse_weights_unlike(layer: str, inputs: TensorLike, weights: TensorLike) -> None:
    """Refuses weights that do not match the ids: after flattening they would apply to other ids.

    Raises:
        BadIds: another kind (ragged, sparse, dense) or static shape than the ids, or in eager mode other row lengths.
            In a graph the latter raises `tf.errors.InvalidArgumentError` when it runs.
    """
    kinds = [_kind(value) for value in (inputs, weights)]
    if kinds[0] != kinds[1] and kinds != ["sparse", "dense"]:
        raise BadIds(f"embedding layer {layer!r}: ids are {kinds[0]} and their weights {kinds[1]}; make both alike")
    message = f"embedding layer {layer!r}: weights must be shaped as the ids"
    if kinds == ["dense", "dense"] and not inputs.shape.is_compatible_with(weights.shape):
        raise BadIds(f"{message}; ids are {inputs.shape}, weights {weights.shape}")
    pairs: list[tuple[tf.Tensor, tf.Tensor]] = []
    if kinds == ["ragged", "ragged"]:
        if inputs.ragged_rank != weights.ragged_rank:
            raise BadIds(f"{message}; ids have {inputs.ragged_rank} ragged axes, weights {weights.ragged_rank}")
        pairs = list(zip(inputs.nested_row_splits, weights.nested_row_splits, strict=True))
    elif kinds == ["sparse", "sparse"]:
        pairs = [(inputs.indices, weights.indices)]
    for ours, theirs in pairs:
        try:
            tf.debugging.assert_equal(tf.cast(ours, tf.int64), tf.cast(theirs, tf.int64), message=message)
        except tf.errors.InvalidArgumentError as error:
            raise BadIds(f"{message}: they differ in where records begin or lie") from error


def _kind(value: TensorLike) -> str:
    if isinstance(value, tf.RaggedTensor):
        return "ragged"
    return "sparse" if isinstance(value, tf.SparseTensor) else "dense"


# Flattens the ids of a call, and shapes flat rows into its output


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

    Of a fixed vocabulary (`input_dim`) sparse integers below 0 are pruned, as in `tf.nn.safe_embedding_lookup_sparse`.
    Under `mask_zero` a combiner skips id 0, or the empty string. With `vocabulary` ids are looked at here, because
    nobody does so behind.

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
        flat = _flatten_sparse(layer, inputs, weights, mask_zero, input_dim)
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
    if not mask_zero:
        return tf.ones_like(values, tf.bool)
    return tf.not_equal(values, "" if values.dtype == tf.string else tf.zeros([], values.dtype))


def _flat(values: TensorLike) -> tf.Tensor:
    return values.flat_values if isinstance(values, tf.RaggedTensor) else tf.reshape(values, [-1])


def _flatten_sparse(
    layer: str, inputs: TensorLike, weights: TensorLike | None, mask_zero: bool, input_dim: int | None
) -> FlatIds:
    ids, kept = as_int64(layer, inputs.values, inputs), _is_kept(inputs.values, mask_zero)
    if input_dim is not None:
        kept &= ids >= 0
    source = tf.sparse.retain(inputs, kept)
    values = None
    if weights is not None:
        flat = weights.values if isinstance(weights, tf.SparseTensor) else weights
        values = tf.boolean_mask(tf.cast(flat, tf.float32), kept)
    return FlatIds(tf.boolean_mask(ids, kept), source, values)


def shape_rows(flat: FlatIds, rows: tf.Tensor, combiner: str | None, dim: int) -> tf.Tensor | tf.RaggedTensor:
    """The output of a call from its flat rows.

    Args:
        rows: float32 `[n, dim]`.
        combiner: How the last axis of the ids is reduced; None: not at all.

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
