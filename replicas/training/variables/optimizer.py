"""A Keras optimizer that updates parts of variables: built on the parts, so that slots of whole ones never exist."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elastable.embedding_store.errors import ModelError, Unsupported
from elastable.replicas.groups.group import Array
from elastable.replicas.training.variables.clipping import GradientClipping

__all__ = ["PartOptimizer", "refuse_optimizer", "refuse_parts", "slots_of"]

# Exact classes whose update of an element looks at no other element.
_ELEMENTWISE = tuple(
    getattr(keras.optimizers, name)
    for name in (
        "SGD",
        "RMSprop",
        "Adam",
        "AdamW",
        "Adadelta",
        "Adagrad",
        "Adamax",
        "Nadam",
        "Ftrl",
        "Lion",
        "ScheduleFreeAdamW",
    )
    if hasattr(keras.optimizers, name)
)
_CLIPS = ("clipnorm", "global_clipnorm", "clipvalue")


def refuse_optimizer(optimizer: Any) -> None:
    """Refuses what cannot be honoured.

    Raises:
        ModelError: it has been built before.
        Unsupported: by name, with the reason.
    """
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
            f"{kind} with gradient_accumulation_steps and clipping: what is accumulated would have to be clipped over "
            "all replicas within the update; leave one of both out"
        )


def refuse_parts(optimizer: Any, shared: Sequence[str]) -> None:
    """Refuses an optimizer that needs whole variables, where there are variables of which replicas update parts.

    Args:
        optimizer: A Keras optimizer.
        shared: Names of these variables.

    Raises:
        Unsupported: by name, with the reason.
    """
    if not shared or type(optimizer) in _ELEMENTWISE or getattr(optimizer, "elementwise", False):
        return
    raise Unsupported(
        f"{type(optimizer).__name__} cannot update {shared[0]} in parts: its update of an element may depend on others "
        f"(known to be elementwise: {', '.join(known.__name__ for known in _ELEMENTWISE)}; an optimizer of your own "
        "says so with a class attribute elementwise = True). Shard neither weights nor optimizer state, or take another"
    )


def slots_of(optimizer: Any) -> int:
    """How many values the optimizer keeps for each element of a variable, found out on a small one.

    Raises:
        ModelError: the optimizer cannot be made from its own configuration.
    """
    try:
        probe = type(optimizer).from_config(optimizer.get_config())
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ModelError(
            f"{type(optimizer).__name__} cannot be made from its get_config(), which is needed to plan: {error}"
        ) from error
    slots: list[tuple[Any, int, str]] = []
    with _noting_slots(probe, slots, [keras.Variable(np.zeros((2, 2), np.float32), name="probe")]) as variables:
        probe.build(variables)
    return len(slots)


class PartOptimizer:
    """Updates buffers and whole variables with one Keras optimizer.

    Args:
        optimizer: Not built yet; clipping is left out, as no replica sees all gradients.
        variables: Of the model, in its order: what weight decay asks for names.
        targets: For each what is updated: a flat buffer, or the variable itself.

    Attributes:
        keras: The optimizer.
        slots: (slot variable, place of the variable it belongs to, name) of every slot.
        clipping: How gradients are to be clipped before `apply`.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any], targets: Sequence[Any]) -> None:
        self.keras = optimizer
        self.clipping = GradientClipping.of(optimizer)
        self.slots: list[tuple[Any, int, str]] = []
        self._targets = list(targets)
        self._decay_as(variables)
        with _noting_slots(optimizer, self.slots, self._targets):
            optimizer.build(self._targets)
        self._applies: dict[tuple[bool, ...], Any] = {}
        self._traced_rate: Any = None

    def apply(self, gradients: Sequence[Array], reached: tuple[bool, ...]) -> None:
        """One step; `iterations` grows by one.

        Args:
            gradients: Clipped, of the targets that are reached, in order.
            reached: For every target whether the loss reaches it; others stay as they are, as in Keras.
        """
        rate = getattr(self.keras, "_learning_rate", None)
        if rate is not self._traced_rate:
            # A schedule is part of the compiled function: one that a callback puts in place means another.
            self._applies, self._traced_rate = {}, rate
        if reached not in self._applies:
            self._applies[reached] = self._compiled(reached)
        self._applies[reached](*(tf.convert_to_tensor(gradient) for gradient in gradients))

    def finish(self) -> None:
        """What Keras does at the end of training: with `use_ema`, variables become their moving averages."""
        self.keras.finalize_variable_values(self._targets)

    def learning_rate(self) -> float:
        """The schedule's at `iterations`, or what was last assigned."""
        return float(keras.ops.convert_to_tensor(self.keras.learning_rate))

    def clone(self) -> Any:
        """An optimizer of the same settings, not built: what the model has between trainings."""
        return type(self.keras).from_config(self.keras.get_config())

    def _compiled(self, reached: tuple[bool, ...]) -> Any:
        updated = [target for target, here in zip(self._targets, reached, strict=True) if here]
        signature = [tf.TensorSpec(tuple(target.shape), tf.as_dtype(target.dtype)) for target in updated]

        def apply(*gradients: Any) -> None:
            if gradients:
                self.keras.apply(list(gradients), updated)
            else:
                self.keras.iterations.assign_add(1)

        with _clipping_off(self.keras):
            return tf.function(apply, autograph=False, input_signature=signature).get_concrete_function()

    def _decay_as(self, variables: Sequence[Any]) -> None:
        """Weight decay is asked for by a variable's name or identity: a buffer gets its variable's answer."""
        if not variables:
            return
        answers = [self.keras._use_weight_decay(variable.value) for variable in variables]
        known = self.keras._exclude_from_weight_decay_cache
        for target, answer in zip(self._targets, answers, strict=True):
            known[self.keras._var_key(target)] = answer


@contextmanager
def _noting_slots(optimizer: Any, slots: list[tuple[Any, int, str]], targets: list[Any]) -> Iterator[list[Any]]:
    """Within, every slot that the optimizer makes for one of the targets is noted."""
    places = {id(target): place for place, target in enumerate(targets)}
    make = optimizer.add_variable_from_reference

    def noting(reference_variable: Any, *args: Any, **named: Any) -> Any:
        slot = make(reference_variable, *args, **named)
        name = args[0] if args else named.get("name")
        slots.append((slot, places[id(reference_variable)], str(name or "slot")))
        return slot

    optimizer.add_variable_from_reference = noting
    try:
        yield targets
    finally:
        del optimizer.add_variable_from_reference


@contextmanager
def _clipping_off(optimizer: Any) -> Iterator[None]:
    """Keras reads these while it is traced; afterwards the user's optimizer is as it was."""
    before = {name: getattr(optimizer, name) for name in _CLIPS}
    try:
        for name in _CLIPS:
            setattr(optimizer, name, None)
        yield
    finally:
        for name, value in before.items():
            setattr(optimizer, name, value)
