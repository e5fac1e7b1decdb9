"""Records what Keras does while a step is traced: reductions of its losses, calls of its layers, updates of metrics."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import keras
from keras.src.losses import loss as keras_loss

from elastable.master.api import DivisorKind
from elastable.master.backend.lazy import tf
from elastable.worker.keras.keras_methods import patched
from elastable.worker.keras.seeds import layers_of
from elastable.worker.keras.structures import TensorLike

_current = threading.local()
_keras_reduce = keras_loss.reduce_weighted_values
_OURS = ("keras.", "elastable.")
_OF_WEIGHTS = ("_initializer", "_regularizer", "_constraint")
#: The class of Keras' losses that are given by a function; of these, those that have one value of a whole batch.
_OF_FUNCTION = keras.losses.MeanSquaredError.__mro__[1]
_OF_BATCH = (keras.losses.Circle, keras.losses.Dice, keras.losses.Tversky)
#: They call other layers, functions of the user, or mix records by design.
_READ_INSIDE = (keras.Model, keras.layers.Lambda, keras.layers.TFSMLayer, keras.layers.MixUp, keras.layers.CutMix)


@dataclass(frozen=True, slots=True)
class RecordedLoss:
    """One reduction.

    Attributes:
        result: The loss: a scalar, or with reduction "none" a value per record.
        values: What it was reduced from: the values, and weights and mask where there are some.
        kind: What it was divided by; `DivisorKind.RECORDS` means the number of values until it is settled
            (`elastable.worker.losses.loss_terms.settled_losses`), None for a divisor that is unknown then.
        amount: With `DivisorKind.AMOUNT` that divisor, a float64 scalar; else None.
        cause: The operation because of which it is unknown.
    """

    result: tf.Tensor
    values: tuple[tf.Tensor, ...]
    kind: DivisorKind | None
    amount: tf.Tensor | None = None
    cause: tf.Operation | None = None


@dataclass(frozen=True, slots=True)
class LayerCall:
    """A call of a layer that computes each record by itself.

    Attributes:
        outputs: Its tensors, each with what it is: "dense", or of a ragged or sparse tensor "values" or "places".
        since: How many operations the graph had before it. A tensor that was there then is no output of the call, such
            as an input that is returned as it is, or its mask.
        inside: Calls of the user's cells in its loop, which have to keep records apart, too.
    """

    inputs: tuple[tf.Tensor, ...]
    outputs: tuple[tuple[tf.Tensor, str], ...]
    since: int
    inside: tuple[LayerCall, ...] = ()


@dataclass(frozen=True, slots=True)
class MetricUpdate:
    """An update of a metric by a class of Keras.

    Attributes:
        by: The class whose `update_state` it is.
        given: The tensors that it was given; of `Mean` and `Sum` the values first.
        weight: Of `Mean` and `Sum`: their sample weight, or None.
    """

    metric: keras.metrics.Metric
    by: type[keras.metrics.Metric]
    given: tuple[tf.Tensor, ...]
    weight: tf.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Recording:
    """What was recorded, in order: the inner call of a layer before the outer one.

    Attributes:
        losses, calls, updates: Of losses, of layers that keep records apart, of metrics.
        cells: id of a layer of the user's -> its last call.
    """

    losses: list[RecordedLoss] = field(default_factory=list)
    calls: list[LayerCall] = field(default_factory=list)
    updates: list[MetricUpdate] = field(default_factory=list)
    cells: dict[int, LayerCall] = field(default_factory=dict)


@contextmanager
def recording(metrics: Sequence[keras.metrics.Metric] = ()) -> Iterator[Recording]:
    """Records what this thread traces within the block.

    Args:
        metrics: Those whose updates are recorded, where a class of Keras makes them.
    """
    before = getattr(_current, "found", None)
    found = Recording()
    _current.found = found
    updating = {keras.metrics.Mean, keras.metrics.Sum, *filter(None, map(keras_metric, metrics))} if metrics else ()
    try:
        with ExitStack() as patches:
            noting, noting_update = map(tf.autograph.experimental.do_not_convert, (_noting, _noting_update))
            patches.enter_context(patched(keras.Layer, "__call__", noting))
            patches.enter_context(patched(_OF_FUNCTION, "call", noting))
            for owner in updating:
                patches.enter_context(patched(owner, "update_state", partial(noting_update, owner)))
            yield found
    finally:
        _current.found = before


def _noting(
    plain: Callable[..., object], called: keras.Layer | keras.losses.Loss, *arguments: object, **options: object
) -> object:
    found: Recording | None = getattr(_current, "found", None)
    if found is None or tf.executing_eagerly():
        return plain(called, *arguments, **options)
    since = len(tf.compat.v1.get_default_graph().get_operations())
    result = plain(called, *arguments, **options)
    _note(found, called, (arguments, options), result, since)
    return result


def _note(found: Recording, called: keras.Layer | keras.losses.Loss, given: object, result: object, since: int) -> None:
    inputs = [part for part in tf.nest.flatten(given, expand_composites=True) if tf.is_tensor(part)]
    made = [tensor for tensor in tf.nest.flatten(result) if tf.is_tensor(tensor)]
    masks = [mask for tensor in made if tf.is_tensor(mask := getattr(tensor, "_keras_mask", None))]
    noted = LayerCall(tuple(inputs), tuple(part for tensor in (*made, *masks) for part in _components(tensor)), since)
    if isinstance(called, keras.losses.Loss):
        if called.fn.__module__.startswith(_OURS) and not isinstance(called, _OF_BATCH):
            found.calls.append(noted)
        return
    strange = [part for part in layers_of(called) if not _keeps_apart(part)]
    cells = [getattr(part, "cell", None) for part in layers_of(called)]
    if all(any(part is cell for cell in cells) and id(part) in found.cells for part in strange):
        found.calls.append(replace(noted, inside=tuple(found.cells[id(part)] for part in strange)))
    else:
        found.cells[id(called)] = noted


def _keeps_apart(layer: keras.Layer) -> bool:
    """Whether it is code of Keras or ours alone, and does not work along the first axis."""
    return not (
        isinstance(layer, _READ_INSIDE)
        or not type(layer).__module__.startswith(_OURS)
        or 0 in tf.nest.flatten(getattr(layer, "axis", None))
        or any(_is_of_program(name, value) for name, value in vars(layer).items())
    )


def _is_of_program(name: str, value: object) -> bool:
    """Whether an attribute of a layer is code of the program, such as an activation, that works on what it computes."""
    if not callable(value) or isinstance(value, keras.Layer | weakref.ref) or name.endswith(_OF_WEIGHTS):
        return False
    return not str(getattr(value, "__module__", None) or type(value).__module__).startswith(_OURS)


def keras_metric(metric: keras.metrics.Metric) -> type[keras.metrics.Metric] | None:
    """The class of Keras that a metric leaves its update to; None: it has its own."""
    for owner in type(metric).__mro__:
        if "update_state" in vars(owner) and owner.__module__.startswith("keras."):
            return None if owner is keras.metrics.Metric else owner
    return None


def _noting_update(
    owner: type[keras.metrics.Metric],
    plain: Callable[..., object],
    metric: keras.metrics.Metric,
    *arguments: object,
    **options: object,
) -> object:
    found: Recording | None = getattr(_current, "found", None)
    if found is not None:
        found.updates.append(_update(owner, metric, arguments, options))
    return plain(metric, *arguments, **options)


def _update(
    owner: type[keras.metrics.Metric],
    metric: keras.metrics.Metric,
    arguments: tuple[object, ...],
    options: Mapping[str, object],
) -> MetricUpdate:
    if owner not in (keras.metrics.Mean, keras.metrics.Sum):
        given = tf.nest.flatten((arguments, options), expand_composites=True)
        return MetricUpdate(metric, owner, tuple(part for part in given if tf.is_tensor(part)))
    values = arguments[0] if arguments else options["values"]
    weight = arguments[1] if len(arguments) > 1 else options.get("sample_weight")
    weight = None if weight is None else tf.convert_to_tensor(weight)
    return MetricUpdate(metric, owner, (tf.convert_to_tensor(values),), weight)


def _components(value: TensorLike) -> list[tuple[tf.Tensor, str]]:
    if isinstance(value, tf.RaggedTensor):
        return [(value.flat_values, "values"), *((splits, "places") for splits in value.nested_row_splits)]
    if isinstance(value, tf.SparseTensor):
        return [(value.values, "values"), (value.indices, "places")]
    return [(value, "dense")]


def _reduce(
    values: tf.Tensor,
    sample_weight: tf.Tensor | None = None,
    mask: tf.Tensor | None = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: str | None = None,
) -> tf.Tensor:
    result = _keras_reduce(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
    found: Recording | None = getattr(_current, "found", None)
    # Only graphs are analysed. A scalar for a whole batch has been reduced elsewhere.
    if found is not None and not tf.executing_eagerly() and tf.convert_to_tensor(values).shape.rank != 0:
        # A new tensor: Keras may return its arguments unchanged.
        result = tf.identity(result)
        kind, amount = _divisor(values, sample_weight, mask, reduction, dtype)
        given = tuple(tf.convert_to_tensor(each) for each in (values, sample_weight, mask) if each is not None)
        found.losses.append(RecordedLoss(result, given, kind, amount))
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
    return DivisorKind.RECORDS, None


# Every `keras.losses.Loss` ends in this function. Only there is it visible whether the loss is a sum, a mean over
# records, or divided by weights or by the size of a mask. In a thread that records nothing it is Keras' own.
# Within a tf.function of the user AutoGraph would convert it, as it converts everything that is called there.
if keras.config.backend() == "tensorflow":
    keras_loss.reduce_weighted_values = tf.autograph.experimental.do_not_convert(_reduce)
