"""Converts a layer's inputs to int64 ids: integers unchanged, strings by their hash."""

from __future__ import annotations

import tensorflow as tf

from elastable.embedding_store.errors import BadIds
from elastable.worker.keras.structures import TensorLike

__all__ = ["as_int64", "refuse_weights_unlike", "require_id_dtype"]


def require_id_dtype(layer: str, dtype: str, input_dim: int | None) -> None:
    """Refuses inputs whose dtype cannot be ids.

    Args:
        layer: Name of the layer, for messages.
        dtype: Dtype of its inputs, by Keras' name.
        input_dim: Its vocabulary; None: any id.

    Raises:
        BadIds: floats, booleans, or strings for a fixed vocabulary.
    """
    if dtype == "string" and input_dim is not None:
        raise BadIds(
            f"embedding layer {layer!r}: called on strings, and input_dim={input_dim} says that ids are integers below "
            f"it; put keras.layers.StringLookup or keras.layers.Hashing(num_bins={input_dim}) in front of it, or use "
            "input_dim=None, with which strings are hashed to ids of 64 bits (et.hash_ids)"
        )
    if dtype != "string" and "int" not in dtype:
        raise BadIds(
            f"embedding layer {layer!r}: ids must be integers or strings, got {dtype}; "
            'declare the input as keras.Input(..., dtype="int64") or dtype="string"'
        )


def as_int64(layer: str, values: tf.Tensor) -> tf.Tensor:
    """int64 `[n]` ids of a flat tensor of integers or strings.

    Strings become their FarmHash `Fingerprint64`, as `elastable.embedding_store.native.ids.string_ids` says.

    Raises:
        BadIds: a uint64 above 2**63 - 1, in eager mode. A graph raises `tf.errors.InvalidArgumentError` when it runs.
    """
    if values.dtype == tf.string:
        return tf.bitcast(tf.fingerprint(values), tf.int64)
    if values.dtype != tf.uint64:
        return tf.cast(values, tf.int64)
    ids = tf.bitcast(values, tf.int64)  # larger values have become negative
    message = f"embedding layer {layer!r}: ids must be at most 2**63 - 1, the largest id of a table; got "
    if tf.executing_eagerly():
        large = tf.boolean_mask(values, ids < 0)
        if len(large):
            raise BadIds(f"{message}{large[0].numpy()}; view them as int64, or hash them (et.hash_ids)")
        return ids
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(ids >= 0), [message, values], summarize=8)]):
        return tf.identity(ids)


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
