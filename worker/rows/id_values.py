"""Converts a layer's inputs to int64 ids: integers unchanged, floats that are integers, strings by their hash."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from elastable.embedding_store.errors import BadIds, IdOutOfRange
from elastable.embedding_store.tables.checks import as_ids
from elastable.worker.keras.structures import TensorLike

__all__ = [
    "BELONGS",
    "EXACT_BITS",
    "as_int64",
    "assertion_of",
    "exact_tensor",
    "plain_ids",
    "refuse_weights_unlike",
    "require_id_dtype",
    "require_in_vocabulary",
]

BELONGS = "the input takes {}"
_LARGEST = "is above 2**63 - 1, the largest id of a table; view ids as int64, or hash them (et.hash_ids)"
EXACT_BITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
"""Dtype -> b: it holds every integer below 2**b in size."""


def require_id_dtype(layer: str, dtype: str, input_dim: int | None) -> None:
    """Refuses inputs whose dtype cannot be ids.

    Args:
        layer: Name of the layer, for messages.
        dtype: Dtype of its inputs, by Keras' name.
        input_dim: Its vocabulary; None: any id.

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


def exact_tensor(value: TensorLike, name: str, dtype: str) -> TensorLike:
    """What an integer input of a model is given: floats as int64, if they are integers; others as they are.

    Args:
        value: Dense, ragged or sparse.
        name: The input.
        dtype: Its dtype, an integer one.

    Raises:
        BadIds: a value that the input cannot hold, in eager mode. A graph raises `tf.errors.InvalidArgumentError`.
    """
    limits, given, where = tf.as_dtype(dtype), value.dtype, f"input {name!r}:"
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
