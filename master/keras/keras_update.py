"""The model's Keras optimizer, as a master drives it: one update for each version.

The gradient comes averaged and clipped. So what Keras itself does before an
update (adding gradients up, clipping) is left out or made an identity, and what
it counts is counted on, so that the user's optimizer ends as after `model.fit`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import keras
import tensorflow as tf

from elastable.master.keras.keras_optimizer import accumulation_of, inner_optimizer, learning_rate_of

__all__ = ["KerasUpdate"]


class KerasUpdate:
    """Updates of a Keras optimizer.

    Under `gradient_accumulation_steps=k` Keras counts batches, k to an update;
    a schedule goes by batches, and so does the count here.

    Under `LossScaleOptimizer` gradients come unscaled. Each update lets its scale
    grow, as in Keras, and `overflow` takes the place of one that is not finite.

    Args:
        optimizer: A Keras optimizer that `refuse_unsupported` lets pass.
    """

    def __init__(self, optimizer: keras.Optimizer) -> None:
        self._scaling = optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else None
        self._optimizer = inner_optimizer(optimizer)
        self._batches = accumulation_of(self._optimizer) or 1

    @property
    def scale(self) -> keras.Variable | None:
        """The variable of a loss scale that changes; None: there is none."""
        return None if self._scaling is None else self._scaling.dynamic_scale

    @property
    def rate(self) -> keras.Variable | keras.optimizers.schedules.LearningRateSchedule:
        """The learning rate's variable, or its schedule."""
        return self._optimizer._learning_rate

    def number(self) -> int:
        """Updates made so far."""
        return int(self._optimizer._iterations.value.numpy()) // self._batches

    def learning_rate(self) -> float:
        """Of the next update: a schedule's at its last batch, or what was last assigned, also by a callback."""
        rate = self._optimizer._learning_rate
        if self._batches > 1 and isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            last = tf.constant(self._optimizer._iterations.value + (self._batches - 1))
            return float(keras.ops.convert_to_tensor(rate(last)))
        return learning_rate_of(self._optimizer)

    def count(self) -> None:
        """Counts an update that changes nothing."""
        self._optimizer._iterations.assign_add(self._batches)
        self._grow()

    def update_tables_only(self) -> None:
        """An update of tables alone, to be traced. Averages of unchanged variables still move, as in Keras."""
        optimizer = self._optimizer
        if optimizer.use_ema:
            known = optimizer._trainable_variables
            optimizer._update_model_variables_moving_average(known)
            if every := optimizer.ema_overwrite_frequency:
                keras.ops.cond(
                    (optimizer.iterations + 1) % every == 0,
                    lambda: optimizer._overwrite_model_variables_with_average_value(known),
                    lambda: None,
                )
        self.count()

    def finalize_averages(self, variables: Sequence[keras.Variable]) -> None:
        """Assigns variables their moving averages, where they have some: what Keras does at the end of `fit`."""
        if not self._optimizer.use_ema or not self.number():
            return
        known = zip(self._optimizer._trainable_variables, self._optimizer._model_variables_moving_average, strict=True)
        averages = {id(variable): average for variable, average in known}
        for variable in variables:
            if averages[id(variable)] is not None:
                variable.assign(averages[id(variable)])

    def apply(self, gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable]) -> None:
        """One update; to be traced within `as_traced`."""
        if self._batches > 1:
            # Keras takes this for the last batch: it adds nothing to it, and divides by their number.
            self._optimizer._iterations.assign_add(self._batches - 1)
            gradients = [gradient * self._batches for gradient in gradients]
        self._optimizer.apply(list(gradients), list(variables))
        self._grow()

    def overflow(self) -> None:
        """In the place of an update whose gradient is not finite, as in Keras: the scale is halved, no step counted."""
        if self._scaling is not None:
            self._scaling.step_counter.assign(0)
            self._scaling.dynamic_scale.assign(self._scaling.dynamic_scale.value * 0.5)

    def _grow(self) -> None:
        if self._scaling is None:
            return
        scale, counter = self._scaling.dynamic_scale, self._scaling.step_counter
        due = tf.equal(counter.value, self._scaling.dynamic_growth_steps - 1)
        scale.assign(tf.where(due, scale.value * 2.0, scale.value))
        counter.assign(tf.where(due, tf.zeros_like(counter.value), counter.value + 1))

    @contextmanager
    def as_traced(self, rate_share: tf.Tensor | None = None) -> Iterator[None]:
        """While a step is traced: no clipping, no unscaling; the learning rate is that share of itself (None: all)."""
        optimizer = self._optimizer
        names = ("clipnorm", "global_clipnorm", "clipvalue", "loss_scale_factor")
        before = {name: getattr(optimizer, name) for name in names}
        rate = optimizer._get_current_learning_rate
        try:
            for name in names:
                setattr(optimizer, name, None)
            if rate_share is not None:
                optimizer._get_current_learning_rate = lambda: rate() * rate_share
            yield
        finally:
            for name, value in before.items():
                setattr(optimizer, name, value)
            if rate_share is not None:
                del optimizer._get_current_learning_rate
