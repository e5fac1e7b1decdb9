"""Records what Keras' losses divide by while a step is traced.

Every `keras.losses.Loss` ends in Keras' `reduce_weighted_values`, which turns the values of a batch, sample weights and
a mask into the loss. Only there is it visible whether the loss is a sum, a mean over records, or divided by weights or
by the size of a mask. The function is wrapped once, when this module is imported; in a thread that records nothing it
is Keras' own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import tensorflow as tf
from keras.src.losses import loss as keras_loss

from elastable.master.api import DivisorKind
from elastable.worker.keras.graphs import ancestors

__all__ = ["RecordedLoss", "recorded_losses"]

#: Operations whose output size depends on the data, not only on the batch size.
_SIZED_BY_DATA = ("Where", "Unique", "DynamicPartition", "StringSplit", "RaggedRange")

_current = threading.local()
_keras_reduce = keras_loss.reduce_weighted_values


@dataclass(frozen=True, slots=True)
class RecordedLoss:
    """One reduction.

    Attributes:
        result: The loss: a scalar, or with reduction "none" a value per record.
        kind: What it was divided by.
        amount: With `DivisorKind.AMOUNT` that divisor, a float64 scalar; else None.
    """

    result: tf.Tensor
    kind: DivisorKind
    amount: tf.Tensor | None = None


@contextmanager
def recorded_losses() -> Iterator[list[RecordedLoss]]:
    """Records the reductions of this thread within the block, in order."""
    before = getattr(_current, "found", None)
    found: list[RecordedLoss] = []
    _current.found = found
    try:
        yield found
    finally:
        _current.found = before


def _reduce(
    values: tf.Tensor,
    sample_weight: tf.Tensor | None = None,
    mask: tf.Tensor | None = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: str | None = None,
) -> tf.Tensor:
    result = _keras_reduce(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
    found = getattr(_current, "found", None)
    # Only graphs are analysed. A scalar for a whole batch has been reduced elsewhere.
    if found is not None and not tf.executing_eagerly() and tf.convert_to_tensor(values).shape.rank != 0:
        # A new tensor: Keras may return its arguments unchanged.
        result = tf.identity(result)
        kind, amount = _divisor(values, sample_weight, mask, reduction, dtype)
        found.append(RecordedLoss(result, kind, amount))
    return result


def _divisor(
    values: tf.Tensor, weight: tf.Tensor | None, mask: tf.Tensor | None, reduction: str | None, dtype: str | None
) -> tuple[DivisorKind, tf.Tensor | None]:
    values = tf.convert_to_tensor(values)
    if reduction in (None, "none", "sum"):
        return DivisorKind.NOTHING, None
    if reduction == "mean_with_sample_weight" and (weight is not None or mask is not None):
        weights = keras_loss.apply_mask(
            None if weight is None else tf.cast(weight, dtype or values.dtype),
            None if mask is None else tf.cast(mask, dtype or values.dtype),
            dtype=values.dtype,
            reduction=reduction,
        )
        return DivisorKind.AMOUNT, tf.reduce_sum(tf.cast(weights, tf.float64))
    if mask is not None:
        # Keras scales the unmasked values by total / valid, and divides by the number of values.
        mask = tf.cast(mask, tf.float64)
        each = tf.cast(tf.size(values), tf.float64) / tf.maximum(tf.cast(tf.size(mask), tf.float64), 1.0)
        return DivisorKind.AMOUNT, tf.reduce_sum(mask) * each
    if _counts_records(values):
        return DivisorKind.RECORDS, None
    return DivisorKind.AMOUNT, tf.cast(tf.size(values), tf.float64)


def _counts_records(values: tf.Tensor) -> bool:
    """Whether the number of values is the number of records, times a constant."""
    if values.shape.rank is None or any(size is None for size in values.shape[1:]):
        return False
    return not any(operation.type.startswith(_SIZED_BY_DATA) for operation in ancestors(values))


# Within a tf.function of the user AutoGraph would convert it, as it converts everything that is called there.
keras_loss.reduce_weighted_values = tf.autograph.experimental.do_not_convert(_reduce)
