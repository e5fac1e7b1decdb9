"""A Keras optimizer of parts of variables, and clipping where no replica holds all gradients."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers import Optimizer

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import ModelError, Unsupported
from elastable.embedding_store.optimizers.fused import FUSED
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.training.sharded_variables import Layout, VariableSplit

# Exact classes whose update of an element depends on no other element.
_NAMES = (*(kind.__name__ for kind in FUSED.values()), "ScheduleFreeAdamW")
_ELEMENTWISE = tuple(getattr(keras.optimizers, name) for name in _NAMES if hasattr(keras.optimizers, name))
_CLIPS = ("clipnorm", "global_clipnorm", "clipvalue")

Slot = tuple[keras.Variable, int, str]
"""A slot variable, the position of the variable it belongs to, and its name."""


def refuse_optimizer(optimizer: Optimizer) -> None:
    """Raises ModelError for an optimizer that is built already, Unsupported (with the reason) for other kinds."""
    kind = type(optimizer).__name__
    wrappers = [getattr(keras.optimizers, name, None) for name in ("LossScaleOptimizer", "MultiOptimizer")]
    if isinstance(optimizer, tuple(wrapper for wrapper in wrappers if wrapper is not None)):
        raise Unsupported(f"{kind} is not supported by et.ReplicaTrainer: give one plain optimizer")
    if optimizer.built:
        raise ModelError(
            f"{kind} has been built already, with the state of whole variables; give et.ReplicaTrainer a new optimizer"
        )
    rate = getattr(optimizer, "_learning_rate", None)
    if callable(rate) and not isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        raise Unsupported(
            f"{kind}(learning_rate={rate!r}): a function as learning rate is not supported, because Keras calls it "
            "once and keeps the value; use a LearningRateSchedule, or set the rate in a callback"
        )
    if optimizer.gradient_accumulation_steps and GradientClipping.of(optimizer) != GradientClipping():
        raise Unsupported(
            f"{kind} with gradient_accumulation_steps and clipping: accumulated gradients would have to be clipped "
            "over all replicas within the update; leave one of the two out"
        )


def refuse_parts(optimizer: Optimizer, shared: Sequence[str]) -> None:
    """Raises Unsupported for an optimizer that needs whole variables if any (`shared`, by name) is updated in parts."""
    if not shared or type(optimizer) in _ELEMENTWISE or getattr(optimizer, "elementwise", False):
        return
    raise Unsupported(
        f"{type(optimizer).__name__} cannot update {shared[0]} in parts: its update of an element may depend on others "
        f"(known to be elementwise: {', '.join(known.__name__ for known in _ELEMENTWISE)}; an optimizer of your own "
        "says so with a class attribute elementwise = True). Shard neither weights nor optimizer state, or take another"
    )


def slots_of(optimizer: Optimizer) -> int:
    """How many values the optimizer keeps per element of a variable, measured on a small one.

    Raises:
        ModelError: the optimizer cannot be created from its own configuration.
    """
    try:
        probe = type(optimizer).from_config(optimizer.get_config())
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ModelError(
            f"{type(optimizer).__name__} cannot be made from its get_config(), which is needed for planning: {error}"
        ) from error
    slots: list[Slot] = []
    with _recording_slots(probe, slots, [keras.Variable(np.zeros((2, 2), np.float32), name="probe")]) as variables:
        probe.build(variables)
    return len(slots)


class PartOptimizer:
    """Updates buffers and whole variables with one Keras optimizer.

    Args:
        optimizer: Not built yet; its clipping is not applied, as no replica sees all gradients.
        variables: The model's variables, in order; decide on weight decay by name.
        targets: What is updated for each: a flat buffer, or the variable itself.

    Attributes:
        clipping: How to clip gradients before `apply`.
    """

    def __init__(
        self, optimizer: Optimizer, variables: Sequence[keras.Variable], targets: Sequence[keras.Variable]
    ) -> None:
        self.keras = optimizer
        self.clipping = GradientClipping.of(optimizer)
        self.slots: list[Slot] = []
        self._targets = list(targets)
        self._decay_as(variables)
        with _recording_slots(optimizer, self.slots, self._targets):
            optimizer.build(self._targets)
        self._applies: dict[tuple[bool, ...], Callable[..., None]] = {}
        self._traced_rate: object = None

    def apply(self, gradients: Sequence[Array], reached: tuple[bool, ...]) -> None:
        """One step; `iterations` grows by one.

        Args:
            gradients: Clipped gradients of the targets that the loss depends on, in order.
            reached: For every target, whether the loss depends on it; others do not change, as in Keras.
        """
        rate = getattr(self.keras, "_learning_rate", None)
        if rate is not self._traced_rate:
            # A schedule is part of the compiled function: a new one from a callback needs a new function.
            self._applies, self._traced_rate = {}, rate
        if reached not in self._applies:
            self._applies[reached] = self._compiled(reached)
        self._applies[reached](*(tf.convert_to_tensor(gradient) for gradient in gradients))

    def finish(self) -> None:
        """Ends training as Keras does: with `use_ema`, variables become their moving averages."""
        self.keras.finalize_variable_values(self._targets)

    def learning_rate(self) -> float:
        """The schedule's value at `iterations`, or the value last assigned."""
        return float(keras.ops.convert_to_tensor(self.keras.learning_rate))

    def clone(self) -> Optimizer:
        """An optimizer with the same settings, not built."""
        return type(self.keras).from_config(self.keras.get_config())

    def _compiled(self, reached: tuple[bool, ...]) -> Callable[..., None]:
        updated = [target for target, here in zip(self._targets, reached, strict=True) if here]
        signature = [tf.TensorSpec(tuple(target.shape), tf.as_dtype(target.dtype)) for target in updated]

        def apply(*gradients: tf.Tensor) -> None:
            if gradients:
                self.keras.apply(list(gradients), updated)
            else:
                self.keras.iterations.assign_add(1)

        with _clipping_off(self.keras):
            traced = tf.function(apply, autograph=False, input_signature=signature)
            compiled: Callable[..., None] = traced.get_concrete_function()
        return compiled

    def _decay_as(self, variables: Sequence[keras.Variable]) -> None:
        """Keras decides on weight decay by a variable's name or identity: a buffer gets its variable's answer."""
        if not variables:
            return
        answers = [self.keras._use_weight_decay(variable.value) for variable in variables]
        known = self.keras._exclude_from_weight_decay_cache
        for target, answer in zip(self._targets, answers, strict=True):
            known[self.keras._var_key(target)] = answer


@contextmanager
def _recording_slots(
    optimizer: Optimizer, slots: list[Slot], targets: list[keras.Variable]
) -> Iterator[list[keras.Variable]]:
    """Records in `slots` every slot that the optimizer creates for one of the targets."""
    places = {id(target): place for place, target in enumerate(targets)}
    make = optimizer.add_variable_from_reference

    def recording(reference_variable: keras.Variable, *args: object, **named: object) -> keras.Variable:
        slot = make(reference_variable, *args, **named)
        name = args[0] if args else named.get("name")
        slots.append((slot, places[id(reference_variable)], str(name or "slot")))
        return slot

    optimizer.add_variable_from_reference = recording
    try:
        yield targets
    finally:
        del optimizer.add_variable_from_reference


@contextmanager
def _clipping_off(optimizer: Optimizer) -> Iterator[None]:
    """Disables clipping while Keras' update is traced, then restores the user's settings."""
    before = {name: getattr(optimizer, name) for name in _CLIPS}
    try:
        for name in _CLIPS:
            setattr(optimizer, name, None)
        yield
    finally:
        for name, value in before.items():
            setattr(optimizer, name, value)


_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class GradientClipping:
    """At most one of Keras' three clipping options; None: not set.

    Attributes:
        clipnorm: Largest norm of one variable's gradient.
        global_clipnorm: Largest norm of all gradients together.
        clipvalue: Largest magnitude of an element.
    """

    clipnorm: float | None = None
    global_clipnorm: float | None = None
    clipvalue: float | None = None

    @classmethod
    def of(cls, optimizer: keras.optimizers.Optimizer) -> "GradientClipping":
        """The clipping options of a Keras optimizer, for gradients of the scaled loss, which Keras unscales first."""
        scale = float(getattr(optimizer, "loss_scale_factor", None) or 1.0)
        asked = {name: getattr(optimizer, name, None) for name in _CLIPS}
        return cls(**{name: float(value) * scale for name, value in asked.items() if value and value > 0})


def squared_norms(group: ReplicaGroup, gradients: Sequence[Array], layouts: Sequence[Layout]) -> list[float]:
    """The squared L2 norm of every whole gradient, the same on every replica.

    Every replica sums its part in float64 (of a whole gradient, the part it would own), and the parts are added in rank
    order. So sharding over all replicas does not change a bit.

    Args:
        group: All replicas; each calls this.
        gradients: Summed over the replicas: whole, or this replica's buffer.
    """
    mine = [_sum_of_squares(_own(group, array, layout)) for array, layout in zip(gradients, layouts, strict=True)]
    everyones = group.all_gather(np.array(mine))
    norms = [0.0] * len(layouts)
    for place, layout in enumerate(layouts):
        for rank in _sharers(group, layout):
            norms[place] += float(everyones[rank, place])
    return norms


def _sharers(group: ReplicaGroup, layout: Layout) -> Sequence[int]:
    """The ranks that have the parts of a gradient together."""
    domain = layout.domain
    return range(group.size) if domain is None else domain.members(domain.group_of(group.rank))


def clip_parts(
    group: ReplicaGroup, clipping: GradientClipping, gradients: Sequence[Array], layouts: Sequence[Layout]
) -> list[Array]:
    """The gradients as a Keras optimizer would clip them; arguments as of `squared_norms`."""
    if clipping.clipvalue is not None:
        return [np.clip(array, -clipping.clipvalue, clipping.clipvalue).astype(array.dtype) for array in gradients]
    if clipping.clipnorm is not None:
        norms = np.sqrt(squared_norms(group, gradients, layouts))
        # np.maximum, as it keeps NaN.
        scales = list(clipping.clipnorm / np.maximum(norms, clipping.clipnorm))
    elif clipping.global_clipnorm is not None:
        norm = np.sqrt(np.float64(sum(squared_norms(group, gradients, layouts))))
        scales = [clipping.global_clipnorm / np.maximum(norm, clipping.global_clipnorm)] * len(gradients)
    else:
        return list(gradients)
    return [array * array.dtype.type(scale) for array, scale in zip(gradients, scales, strict=True)]


def _own(group: ReplicaGroup, array: Array, layout: Layout) -> Array:
    """This replica's elements of a gradient, flat and without padding."""
    if layout.domain is None:
        first, last = VariableSplit(array.size, group.size).bounds(group.rank)
        return array.reshape(-1)[first:last]
    first, last = layout.split.bounds(_sharers(group, layout).index(group.rank))
    return array[: last - first]


def _sum_of_squares(flat: Array) -> float:
    total = 0.0
    for first in range(0, flat.size, _AT_ONCE):
        total += float(np.square(flat[first : first + _AT_ONCE], dtype=np.float64).sum())
    return total
