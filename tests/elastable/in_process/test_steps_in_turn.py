"""A `train_step` that applies several gradients trains in workers as the same loop trains in plain Keras."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.errors import Unsupported
from tests.elastable.gan_job import (
    DATA,
    MICRO,
    Gan,
    at_once,
    at_once_plainly,
    dense,
    in_keras,
    in_store,
    require_same,
    rows,
    same_start,
)
from tests.untyped import Keyword

Updates = Callable[..., object]
Optimizers = Callable[[], tuple[object, object]]


def pair(ours: Updates, theirs: Updates, optimizers: Optimizers) -> tuple[Gan, Gan]:
    """The same GAN with tables in a store and in plain Keras, from the same start."""
    mine, plain = Gan(in_store, ours), Gan(in_keras, theirs)
    same_start(mine, plain)
    for model in (mine, plain):
        model.compile(*optimizers())
    plain.run_eagerly = True  # for a few steps, a graph costs more
    return mine, plain


def assert_same(mine: Gan, plain: Gan, history: keras.callbacks.History, theirs: keras.callbacks.History) -> None:
    """Metrics and iteration counts are those of plain Keras."""
    assert set(history.history) == set(theirs.history)
    for name, values in theirs.history.items():
        assert history.history[name] == pytest.approx(values, rel=1e-4), name
    for optimizer, other in ((mine.judge, plain.judge), (mine.make, plain.make)):
        assert int(optimizer.iterations) == int(other.iterations)


def adam_and_momentum() -> tuple[object, object]:
    return keras.optimizers.Adam(0.02), keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.2)


def decaying() -> tuple[keras.Model, keras.Model]:
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)
    return keras.optimizers.Adagrad(rate, clipnorm=0.3), keras.optimizers.AdamW(0.02, weight_decay=0.1)


def touching() -> tuple[keras.Model, keras.Model]:
    """Both leave rows alone that no batch touches."""
    return keras.optimizers.Adagrad(0.1), keras.optimizers.SGD(0.1, clipvalue=0.01)


@pytest.mark.parametrize(
    ("wait", "lazy", "optimizers"),
    [
        (1, False, adam_and_momentum),
        pytest.param(1, False, decaying, marks=pytest.mark.slow),
        pytest.param(3, False, adam_and_momentum, marks=pytest.mark.slow),
        (3, False, decaying),
        (3, True, touching),
    ],
)
def test_a_gan_has_the_numbers_of_plain_keras(wait: int, lazy: bool, optimizers: Optimizers) -> None:
    """One step of `wait` micro-batches is one batch of plain Keras; the last of an epoch has fewer."""
    mine, plain = pair(at_once, at_once_plainly, optimizers)
    before = rows(mine)
    history = et.fit(mine, *DATA, epochs=2, batch_size=MICRO, grads_to_wait=wait, shuffle=False, verbose=0, lazy=lazy)
    expected = plain.fit(*DATA, epochs=2, batch_size=MICRO * wait, shuffle=False, verbose=0)
    require_same(mine, plain, before)
    assert_same(mine, plain, history, expected)


def judged_alone(model: keras.Model, z: tf.Tensor, labels: tf.Tensor, real: tf.Tensor) -> tf.Tensor:
    """One update, of a part of the model by another optimizer than that of `compile()`."""
    with et.step(model) as step:
        with tf.GradientTape() as tape:
            judged = model.judge_loss(z, labels, real)
        step.apply(tape, judged, of=model.discriminator, optimizer=model.judge)
    return judged, judged


def judged_alone_plainly(model: keras.Model, z: tf.Tensor, labels: tf.Tensor, real: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        judged = model.judge_loss(z, labels, real)
    dense(model.discriminator, tape, judged, model.judge)
    return judged, judged


def test_a_part_of_a_model_takes_a_step_of_another_optimizer_and_the_rest_stays() -> None:
    mine, plain = pair(judged_alone, judged_alone_plainly, adam_and_momentum)
    before = rows(mine)
    history = et.fit(mine, *DATA, batch_size=MICRO, grads_to_wait=2, shuffle=False, verbose=0, lazy=False)
    expected = plain.fit(*DATA, batch_size=MICRO * 2, shuffle=False, verbose=0)
    np.testing.assert_array_equal(rows(mine)["makes"], before["makes"])
    require_same(mine, plain, before, ("judges",))
    assert_same(mine, plain, history, expected)


class Towers(keras.Model):
    """Two towers with batch normalisation, trained by two losses of the one optimizer of `compile()`."""

    def __init__(self, updates: Callable[..., object]) -> None:
        super().__init__()
        start = keras.initializers.GlorotUniform(seed=3)
        self.updates = updates
        self.rows, self.other = in_store("rows"), in_store("other")
        self.norm = keras.layers.BatchNormalization()
        self.out = keras.layers.Dense(1, kernel_initializer=start)
        self.left = keras.layers.Dense(1, kernel_initializer=start)
        self.error = keras.metrics.MeanSquaredError(name="error")

    def build(self, shape: object) -> None:
        self.built = True

    def call(self, labels: tf.Tensor, training: bool = False) -> tf.Tensor:
        return self.out(self.norm(self.rows(labels), training=training))

    def error_of(self, labels: object, real: object) -> tf.Tensor:
        """The loss of the first update, and what it was computed of."""
        predicted = self(labels, training=True)
        return tf.reduce_mean(tf.square(predicted - real)), predicted

    def apart(self, labels: object, training: bool = True) -> object:
        """The loss of the second: it reaches both tables, and not the same layers."""
        seen = self.norm(self.rows(labels), training=training)
        return tf.reduce_mean(tf.square(self.left(seen) - tf.reduce_sum(self.other(labels), axis=1, keepdims=True)))

    def train_step(self, data: tuple[tf.Tensor, ...]) -> dict[str, tf.Tensor]:
        labels, real = data
        predicted = self.updates(self, labels, real)
        self.error.update_state(real, predicted)
        return {"error": self.error.result()}


def applied(step: Any, compute: Callable[[], Any], **how: object) -> tf.Tensor:
    """One update by a loss, or by the first of (loss, what it was computed of); the last of what was computed."""
    with tf.GradientTape() as tape:
        found = compute()
        found = found if isinstance(found, tuple) else (found,)
    step.apply(tape, found[0], **how)
    return found[-1]


def two_losses(model: Towers, labels: tf.Tensor, real: tf.Tensor) -> tf.Tensor:
    """One after the other."""
    with et.step(model) as step:
        predicted = applied(step, lambda: model.error_of(labels, real))
        applied(step, lambda: model.apart(labels))
    return predicted


IDS, Y = DATA[0][1], DATA[1][:, :1]


def refused(model: Towers, **arguments: Keyword) -> None:
    """Builds the model and trains it."""
    model(IDS[:2])
    model.apart(IDS[:2])
    model.compile(keras.optimizers.AdamW(0.02, weight_decay=0.1, **arguments))
    et.fit(model, IDS, Y, batch_size=8, verbose=0)


def both_tapes(model: keras.Model, labels: tf.Tensor, real: tf.Tensor) -> object:
    """Two losses of the same weights, both of which move the same variables."""
    with et.step(model) as step:
        with tf.GradientTape() as first, tf.GradientTape() as second:
            loss, predicted = model.error_of(labels, real)
            other = model.apart(labels)
        step.apply(first, loss)
        step.apply(second, other)
    return predicted


def mixed(model: keras.Model, labels: tf.Tensor, real: tf.Tensor) -> object:
    """The second loss is computed of numbers from before and after the first update."""
    with et.step(model) as step:
        predicted = applied(step, lambda: model.error_of(labels, real))
        applied(step, lambda: model.apart(labels) * tf.reduce_mean(predicted))
    return predicted


def measured_late(model: keras.Model, labels: tf.Tensor, real: tf.Tensor) -> object:
    """A metric of the weights after the last update."""
    with et.step(model) as step:
        applied(step, lambda: model.error_of(labels, real))
    return model(labels)


def metric_in_loss(model: keras.Model, labels: tf.Tensor, real: tf.Tensor) -> object:
    with et.step(model) as step:
        with tf.GradientTape() as tape:
            loss, predicted = model.error_of(labels, real)
            loss = loss * model.error.result()
        step.apply(tape, loss)
    return predicted


OTHER = keras.optimizers.SGD(0.1)


def two_optimizers(model: keras.Model, labels: tf.Tensor, real: tf.Tensor) -> object:
    with et.step(model) as step:
        predicted = applied(step, lambda: model.error_of(labels, real))
        applied(step, lambda: model.apart(labels), optimizer=OTHER)
    return predicted


def not_its_own(model: keras.Model, labels: tf.Tensor, real: tf.Tensor) -> object:
    """A layer that the model does not hold."""
    with et.step(model) as step:
        applied(step, lambda: tf.reduce_mean(STRAY(model.rows(labels))), of=[model.rows, STRAY])
    return model.rows(labels)[:, :1]


STRAY = keras.layers.Dense(1)
STRAY.build((None, 4))


SECOND = (
    r"loss of step\.apply number 2 is computed from .*, which a step\.apply before it changes\. That needs a second "
    r"version.* as other:.*with et\.step\(model\) as step:"
)


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        (
            both_tapes,
            r"step\.apply number 2 of its train_step changes (the table )?'.*', which an earlier one changes, too",
        ),
        (mixed, SECOND),
        (two_losses, SECOND),
        (measured_late, r"metric 'error' is updated with values that its train_step computes from .* has changed it"),
        (metric_in_loss, r"computed from the metric variable '.*(total|count)"),
        (two_optimizers, r"table 'rows' is trained by two optimizers"),
        (not_its_own, r"trains '.*kernel', which is no part of the model"),
    ],
)
def test_what_cannot_be_computed_of_one_version_is_refused(updates: Callable[..., object], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        refused(Towers(updates))


def test_settings_of_an_optimizer_that_are_for_a_whole_training_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match=r"AdamW\(use_ema=True\) is not supported in a train_step"):
        refused(Towers(two_losses), use_ema=True)
    with pytest.raises(Unsupported, match=r"AdamW\(gradient_accumulation_steps=2\) is not supported in a train_step"):
        refused(Towers(two_losses), gradient_accumulation_steps=2)


class Follows(Towers):
    """A layer's weights follow another's, which the update has just changed."""

    def __init__(self, updates: Callable[..., object]) -> None:
        super().__init__(updates)
        self.slow = keras.layers.Dense(1, trainable=False)
        self.slow.build((None, 4))

    def train_step(self, data: tuple[tf.Tensor, ...]) -> dict[str, tf.Tensor]:
        logs = super().train_step(data)
        self.slow.kernel.assign(0.9 * self.slow.kernel + 0.1 * self.left.kernel)
        return logs


def apart_alone(model: keras.Model, labels: tf.Tensor, real: tf.Tensor) -> object:
    """One update, which changes the weights that the state follows."""
    with et.step(model) as step:
        return applied(step, lambda: (model.apart(labels), model(labels)))


def test_a_state_that_follows_weights_just_updated_is_refused() -> None:
    message = r"assigned to '.*kernel' is computed from .*, which a step\.apply before it changes"
    with pytest.raises(Unsupported, match=message):
        refused(Follows(apart_alone))
