"""A model that overrides `train_step` with `et.step` trains in workers as plain Keras trains it."""

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import Unsupported
from tests.untyped import Keyword

WORDS, DIM, RECORDS, MICRO = 12, 3, 40, 4
RANDOM = np.random.default_rng(4)
IDS = RANDOM.integers(0, WORDS, (RECORDS, 3))
Y = RANDOM.normal(size=(RECORDS, 1)).astype(np.float32)
WEIGHTS = RANDOM.uniform(0.1, 2.0, RECORDS).astype(np.float32)


class Two(keras.Model):
    """Two losses of two calls of one layer, and metrics of its own; `take` takes the step."""

    def __init__(
        self, layer: keras.layers.Layer, take: Callable[..., tuple[object, object]], weighted: bool = False
    ) -> None:
        super().__init__()
        start = keras.initializers.GlorotUniform(seed=1)
        self.words, self.out = layer, keras.layers.Dense(1, kernel_initializer=start)
        self.take, self.weighted = take, weighted
        self.seen = keras.metrics.Mean(name="seen")
        self.error = keras.metrics.MeanAbsoluteError(name="error")
        self.entropy = keras.losses.MeanSquaredError("mean_with_sample_weight" if weighted else "sum_over_batch_size")

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        return self.out(tf.reduce_sum(self.words(ids), axis=1))

    def two_losses(self, data: tf.Tensor) -> tf.Tensor:
        """(loss, predicted)."""
        ids, y, weight = data
        predicted = self(ids, training=True)
        loss = self.entropy(y, predicted, weight)
        if not self.weighted:
            loss = loss + 0.3 * tf.reduce_mean(tf.square(self.words(ids % 5)))
        return loss, predicted

    def train_step(self, data: tuple[tf.Tensor, ...]) -> dict[str, tf.Tensor]:
        loss, predicted = self.take(self, data)
        self.seen.update_state(loss, sample_weight=tf.shape(predicted)[0])
        self.error.update_state(data[1], predicted)
        return {"seen": self.seen.result(), "error": self.error.result()}

    def test_step(self, data: tuple[tf.Tensor, ...]) -> dict[str, tf.Tensor]:
        ids, y, _ = data
        self.error.update_state(y, self(ids, training=False))
        return {"error": self.error.result()}


def with_step(model: Two, data: tf.Tensor) -> tf.Tensor:
    """As a model is written that trains in workers."""
    with et.step(model) as step:
        with tf.GradientTape() as tape:
            loss, predicted = model.two_losses(data)
        step.apply(tape, loss)
    return loss, predicted


def plainly(model: Two, data: tf.Tensor) -> tf.Tensor:
    """As the same is written in plain Keras."""
    with tf.GradientTape() as tape:
        loss, predicted = model.two_losses(data)
    gradients = [tf.convert_to_tensor(each) for each in tape.gradient(loss, model.trainable_weights)]
    model.optimizer.apply(gradients, model.trainable_weights)
    return loss, predicted


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("wait", "weighted"), [(1, False), (3, False), (3, True)])
def test_a_train_step_of_ones_own_has_the_numbers_of_plain_keras(wait: int, weighted: bool) -> None:
    layer = et.Embedding(WORDS, DIM, name="words")
    ours = Two(layer, with_step, weighted)
    plain = Two(keras.layers.Embedding(WORDS, DIM, name="words"), plainly, weighted)
    plain(IDS)
    plain.words.set_weights([layer.read_rows(np.arange(WORDS))])
    for model in (ours, plain):
        model.compile(keras.optimizers.Adagrad(0.1))
    store = MemoryStore()
    data = (IDS, Y, WEIGHTS)
    mine = et.fit(
        ours, data, epochs=2, batch_size=MICRO, grads_to_wait=wait, validation_data=data, store=store, shuffle=False,
        verbose=False,
    )  # fmt: skip
    plain.run_eagerly = True  # for a few steps, a graph costs more
    theirs = plain.fit(
        IDS, Y, sample_weight=WEIGHTS, epochs=2, batch_size=MICRO * wait, validation_data=data, shuffle=False, verbose=0
    )
    rows = np.asarray(plain.words.embeddings)
    np.testing.assert_allclose(store.lookup({"words": np.arange(WORDS)})["words"], rows, rtol=1e-5, atol=1e-6)
    for mine_weight, weight in zip(ours.out.weights, plain.out.weights, strict=True):
        np.testing.assert_allclose(mine_weight, weight, rtol=1e-5, atol=1e-6)
    assert set(mine.history) == {"seen", "error", "val_error", "val_seen"}
    for name in ("error", "val_error") if weighted else ("seen", "error", "val_error"):
        assert mine.history[name] == pytest.approx(theirs.history[name], rel=1e-5), name


def test_a_metric_of_ones_own_may_be_called_loss() -> None:
    found = []
    for name in ("loss", "seen"):
        model = Two(et.Embedding(WORDS, DIM, name="words", weights=[np.ones((WORDS, DIM))]), with_step)
        model.seen = keras.metrics.Mean(name=name)
        model.compile(keras.optimizers.SGD(0.001))
        found.append(et.fit(model, (IDS, Y, WEIGHTS), batch_size=MICRO, verbose=False).history[name])
    assert found[0] == found[1]


def fitted(take: Callable[[keras.Model, tf.Tensor], tf.Tensor], wait: int = 1, **arguments: Keyword) -> None:
    layer = et.Embedding(WORDS, DIM, name="words", **arguments)
    model = Two(layer, take)
    model.compile(keras.optimizers.SGD(0.1))
    et.fit(model, (IDS, Y, WEIGHTS), batch_size=MICRO, grads_to_wait=wait, verbose=False)


def with_both(model: keras.Model, data: object) -> object:
    """A step of `et.step`, and a change outside it."""
    result = with_step(model, data)
    model.out.bias.assign_add([1.0])
    return result


@pytest.mark.parametrize(
    ("take", "message"),
    [
        (plainly, r"'words': a tape is asked for .*with et\.step.*docs/fit\.md"),
        (with_both, r"changes '.*bias' itself"),
    ],
)
def test_what_no_worker_can_run_is_refused_and_says_what_to_write(take: Callable[..., object], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        fitted(take)


def test_losses_that_are_divided_differently_and_regularizers_are_refused() -> None:
    def mixed(model: keras.Model, data: object) -> object:
        with et.step(model) as step:
            with tf.GradientTape() as tape:
                loss, predicted = model.two_losses(data)
                loss = loss + tf.reduce_sum(predicted)
            step.apply(tape, loss)
        return loss, predicted

    fitted(mixed)
    with pytest.raises(Unsupported, match="terms that are divided by different numbers"):
        fitted(mixed, wait=2)
    with pytest.raises(Unsupported, match="leave embeddings_regularizer out"):
        fitted(with_step, embeddings_regularizer="l2")
