"""Several micro-batches to a version train as one batch of plain Keras, whatever the loss is divided by."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import NotFinite, Unsupported
from tests.untyped import Keyword, Keywords

WORDS, DIM, STEPS, MICRO, WAIT, RECORDS = 12, 3, 5, 4, 3, 44  # the last version has 8 of 12 records
RANDOM = np.random.default_rng(4)
IDS = RANDOM.integers(1, WORDS, (RECORDS, STEPS))
for row, length in enumerate(RANDOM.integers(1, STEPS + 1, RECORDS)):
    IDS[row, length:] = 0
ONE = RANDOM.normal(size=(RECORDS, 1)).astype(np.float32)
EACH = RANDOM.normal(size=(RECORDS, STEPS, 1)).astype(np.float32)
WEIGHTS = RANDOM.uniform(0.1, 3.0, RECORDS).astype(np.float32)
WEIGHTS[:MICRO] = 0.0  # a micro-batch without any weight
L2 = keras.regularizers.L2(0.05)


def in_store(**arguments: Keyword) -> keras.layers.Layer:
    return et.Embedding(output_dim=DIM, input_dim=WORDS, name="words", **arguments)


def in_keras(**arguments: object) -> keras.layers.Layer:
    return keras.layers.Embedding(WORDS, DIM, name="words", **arguments)


def dense(units: int = 1, seed: int = 1, **arguments: object) -> keras.layers.Layer:
    return keras.layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed=seed), **arguments)


def one_a_record(
    embedding: Callable[..., keras.layers.Layer], cls: type[keras.Model] = keras.Model, **arguments: Keyword
) -> keras.Model:
    ids = keras.Input((STEPS,), dtype="int64")
    hidden = dense(4, activation="tanh", **arguments)(keras.layers.Flatten()(embedding()(ids)))
    return cls(ids, dense(seed=2, name="out")(hidden))


def masked(embedding: Callable[..., keras.layers.Layer]) -> object:
    """A model with an output a step, those of id 0 masked."""
    ids = keras.Input((STEPS,), dtype="int64")
    return keras.Model(ids, dense(name="out")(embedding(mask_zero=True)(ids)))


class Adds(keras.layers.Layer):
    def __init__(self, loss: Callable[..., object]) -> None:
        super().__init__()
        self.loss = loss

    def call(self, x: tf.Tensor) -> tf.Tensor:
        self.add_loss(self.loss(x))
        return x


def adds(loss: Callable[..., object]) -> Callable[..., object]:
    def make(embedding: Callable[..., keras.layers.Layer]) -> object:
        ids = keras.Input((STEPS,), dtype="int64")
        flat = Adds(loss)(keras.layers.Flatten()(embedding()(ids)))
        return keras.Model(ids, dense(seed=2, name="out")(flat))

    return make


def mse(reduction: str | None, scale: object = None) -> keras.losses.Loss:
    return keras.losses.MeanSquaredError(reduction=reduction)


class WeightedByHand(keras.Model):
    """A custom loss: divided by the weights, plus a mean."""

    def compute_loss(
        self, x: tf.Tensor, y: tf.Tensor, y_pred: tf.Tensor, sample_weight: tf.Tensor, training: bool = True
    ) -> object:
        errors = tf.square(y_pred - y)[:, 0]
        weighted = tf.math.divide_no_nan(tf.reduce_sum(errors * sample_weight), tf.reduce_sum(sample_weight))
        return 0.7 * weighted + tf.reduce_sum(tf.abs(y_pred)) / tf.cast(tf.shape(y_pred)[0], tf.float32) - 0.2


class Uncertain(keras.Model):
    """Keras' loss times a trained factor, and a penalty on that factor."""

    def build(self, shape: object) -> None:
        super().build(shape)
        self.scale = self.add_weight(shape=(), initializer="zeros", name="scale")

    def compute_loss(
        self, x: tf.Tensor, y: tf.Tensor, y_pred: tf.Tensor, sample_weight: tf.Tensor, training: bool = True
    ) -> tf.Tensor:
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return keras.ops.exp(-self.scale) * loss + self.scale


Make = Callable[[Callable[..., keras.layers.Layer]], keras.Model]
CASES: dict[str, tuple[Make, keras.losses.Loss | str | None, Array, Array | None]] = {
    "mean": (one_a_record, "mse", ONE, None),
    "mean, weighted": (one_a_record, mse("sum_over_batch_size"), ONE, WEIGHTS),
    "sum": (one_a_record, mse("sum"), ONE, None),
    "sum, weighted": (one_a_record, mse("sum"), ONE, WEIGHTS),
    "none": (one_a_record, mse("none"), ONE, None),
    "mean with sample weight": (one_a_record, mse("mean_with_sample_weight"), ONE, WEIGHTS),
    "masked mean": (masked, "mse", EACH, None),
    "masked sum": (masked, mse("sum"), EACH, None),
    "masked mean with sample weight": (masked, mse("mean_with_sample_weight"), EACH, None),
    "masked mean, weighted": (masked, "mse", EACH, WEIGHTS[:, np.newaxis]),
    "sum and a regularizer": (lambda e: one_a_record(e, kernel_regularizer=L2), mse("sum"), ONE, None),
    "sum and an activity regularizer": (lambda e: one_a_record(e, activity_regularizer=L2), mse("sum"), ONE, None),
    "added mean": (adds(lambda x: 0.1 * keras.ops.mean(keras.ops.square(x))), mse("sum"), ONE, None),
    "added sum": (adds(lambda x: 0.1 * keras.ops.sum(keras.ops.square(x))), "mse", ONE, None),
    "added and marked": (adds(lambda x: et.summed(tf.norm(x[:, :1], ord=1))), "mse", ONE, None),
    "divided by hand": (lambda e: one_a_record(e, WeightedByHand), None, ONE, WEIGHTS),
    "a trained factor": (lambda e: one_a_record(e, Uncertain), mse("mean_with_sample_weight"), ONE, WEIGHTS),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_micro_batches_equal_one_batch_of_plain_keras(case: str) -> None:
    make, loss, y, weights = CASES[case]
    ours, plain = make(in_store), make(in_keras)
    plain.get_layer("words").set_weights([ours.get_layer("words").read_rows(np.arange(WORDS))])
    for model in (ours, plain):
        model.compile(keras.optimizers.SGD(0.05), loss)
    store = MemoryStore()
    data = (IDS, y) if weights is None else (IDS, y, weights)
    mine = et.fit(ours, data, batch_size=MICRO, grads_to_wait=WAIT, store=store, shuffle=False, verbose=False)
    plain.run_eagerly = True  # for a few steps, a graph costs more
    theirs = plain.fit(IDS, y, sample_weight=weights, batch_size=MICRO * WAIT, shuffle=False, verbose=0)
    rows = np.asarray(plain.get_layer("words").embeddings)
    np.testing.assert_allclose(store.lookup({"words": np.arange(WORDS)})["words"], rows, rtol=1e-5, atol=1e-6)
    for weight, other in zip(ours.weights, plain.weights, strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-5, atol=1e-6)
    assert mine.history.keys() == theirs.history.keys()
    for name, values in theirs.history.items():
        assert mine.history[name] == pytest.approx(values, rel=1e-5), name


def fitted(
    make: Callable[[Callable[..., keras.layers.Layer]], keras.Model],
    loss: Callable[..., object] | keras.losses.Loss | str,
    average: str,
    **arguments: object,
) -> keras.Model:
    model = make(in_store)
    model.compile(keras.optimizers.SGD(0.05), loss, **arguments)
    settings: Keywords = {"batch_size": MICRO, "grads_to_wait": RECORDS // MICRO, "average": average}
    et.fit(model, (IDS, ONE), **settings, shuffle=False, seed=0, verbose=False)
    return model


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (one_a_record, lambda y, predicted: tf.sqrt(tf.reduce_mean(tf.square(y - predicted)))),
        (adds(lambda x: tf.reduce_sum(x / tf.cast(tf.shape(x)[0], tf.float32))), "mse"),
        (adds(lambda x: tf.norm(x)), "mse"),
        (adds(lambda x: tf.reduce_mean(x) * 0.0 + tf.cast(tf.cast(tf.reduce_sum(x), tf.int32), tf.float32)), "mse"),
    ],
)
def test_what_cannot_be_combined_is_refused(make: Callable[..., object], loss: Callable[..., object] | str) -> None:
    with pytest.raises(Unsupported, match=r"needs a known divisor.* et.averaged\(term\).*average='records'"):
        fitted(make, loss, "mean")
    if make is one_a_record:
        fitted(make, loss, "records")


def test_a_regularizer_that_joins_rows_is_refused() -> None:
    class Joined(keras.regularizers.Regularizer):
        def __call__(self, rows: object) -> tf.Tensor:
            return keras.ops.square(keras.ops.sum(rows))

    with pytest.raises(Unsupported, match="'words': its regularizer Joined combines the rows"):
        fitted(lambda e: one_a_record(lambda: e(embeddings_regularizer=Joined())), "mse", "mean")


class Tracked(keras.Model):
    """A `train_step` as Keras' guides write it: a mean of the loss of each batch."""

    def build(self, shape: object) -> None:
        super().build(shape)
        self.tracker = keras.metrics.Mean(name="tracked")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.tracker]

    def train_step(self, data: tuple[tf.Tensor, tf.Tensor]) -> dict[str, object]:
        x, y = data
        with et.step(self) as step:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.boolean_mask(tf.square(y - self(x, training=True)), y > 0))
            step.apply(tape, loss)
        self.tracker.update_state(loss)
        return {"tracked": self.tracker.result()}


def test_a_loss_that_a_step_tracks_is_a_mean_of_versions() -> None:
    """The last version is smaller: it counts as much as the others, as in Keras."""
    histories = []
    for micro, wait in ((MICRO, WAIT), (MICRO * WAIT, 1)):
        model = one_a_record(lambda: in_store(embeddings_initializer="ones"), Tracked)
        model.compile(keras.optimizers.SGD(0.05))
        done = et.fit(model, (IDS, ONE), epochs=2, batch_size=micro, grads_to_wait=wait, shuffle=False, verbose=False)
        histories.append(done.history["tracked"])
    assert histories[0] == pytest.approx(histories[1], rel=1e-5)


def test_the_reported_loss_of_a_regularized_table_does_not_depend_on_how_a_batch_is_cut() -> None:
    """Micro-batches share rows."""
    losses = []
    for micro, wait in ((MICRO, WAIT), (MICRO * WAIT, 1)):
        rows = keras.initializers.Constant(0.3)
        model = one_a_record(lambda: in_store(embeddings_regularizer=L2, embeddings_initializer=rows))  # noqa: B023
        model.compile(keras.optimizers.SGD(0.05), "mse")
        done = et.fit(model, (IDS, ONE), epochs=2, batch_size=micro, grads_to_wait=wait, shuffle=False, verbose=False)
        losses.append(done.history["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(("wait", "average", "warned"), [(3, "mean", True), (3, "batches", False)])
def test_normalization_is_warned_of(wait: int, average: str, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    ids = keras.Input((STEPS,), dtype="int64")
    normal = keras.layers.BatchNormalization(name="normal")(keras.layers.Flatten()(in_store()(ids)))
    model = keras.Model(ids, dense(name="out")(normal))
    model.compile("sgd", "mse")
    et.fit(model, (IDS, ONE), batch_size=MICRO, grads_to_wait=wait, average=average, verbose=False)
    assert ("BatchNormalization ('normal') takes the statistics of each micro-batch" in caplog.text) is warned


def test_states_are_warned_of_where_gradients_are_accumulated(caplog: pytest.LogCaptureFixture) -> None:
    ids = keras.Input((STEPS,), dtype="int64")
    normal = keras.layers.BatchNormalization(name="normal")(keras.layers.Flatten()(in_store()(ids)))
    model = keras.Model(ids, dense(name="out")(keras.layers.Dropout(0.1)(normal)))
    model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
    model.fit(IDS[:16], ONE[:16], batch_size=4, verbose=0)
    assert caplog.text.count("the state of layer") == 1
    assert "the state of layer 'normal' (moving_mean) becomes the mean over the batches" in caplog.text


class _Code:
    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return keras.activations.softmax(x, axis=0)


def test_code_in_a_layer_of_keras_is_read() -> None:
    def make(embedding: Callable[..., keras.layers.Layer]) -> object:
        ids = keras.Input((STEPS,), dtype="int64")
        flat = keras.layers.Flatten()(embedding(embeddings_regularizer=lambda rows: keras.ops.sum(rows * rows))(ids))
        return keras.Model(ids, dense(name="out")(dense(3, activation=activation)(flat)))

    for activation in (partial(keras.activations.softmax, axis=0), _Code(), _Code().__call__):  # noqa: B007
        with pytest.raises(Unsupported, match=r"needs a known divisor.*'functional.*/dense.*is unknown"):
            fitted(make, "mse", "mean")
    activation = keras.activations.gelu
    fitted(make, "mse", "mean")


class Penalised(keras.Model):
    """With a penalty on what its code finds in the weights."""

    share = None

    def __init__(self, embedding: Callable[..., keras.layers.Layer], pick: Callable[..., list[tf.Tensor]]) -> None:
        super().__init__()
        start = keras.initializers.Constant(np.linspace(-1, 1, WORDS * DIM).reshape(WORDS, DIM))
        self.words, self.flat, self.out = embedding(embeddings_initializer=start), keras.layers.Flatten(), dense()
        self.pick = pick

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        return self.out(self.flat(self.words(ids)))

    def compute_loss(self, x: object, y: tf.Tensor, y_pred: tf.Tensor, *how: object, **more: object) -> tf.Tensor:
        self.share = self.share or 0.3 / len(self.trainable_variables)
        penalties = [keras.ops.sum(keras.ops.square(each)) for each in self.pick(self)]
        return keras.ops.mean(keras.ops.square(y - y_pred)) + self.share * sum(penalties)


# tests/keras_table has penalties over all of them, of models that are built.
PICKS: dict[str, Callable[[Penalised], list[tf.Tensor]]] = {
    "first": lambda model: [model.words.weights[0]],
    "from a start": lambda model: [a - 0.1 * i for i, a in enumerate(model.trainable_variables)],
}


@pytest.mark.parametrize("pick", PICKS)
def test_rows_are_among_the_weights_before_a_training_too(pick: str) -> None:
    histories = []
    for embedding in (in_store, in_keras):
        model = Penalised(embedding, PICKS[pick])
        model.compile(keras.optimizers.SGD(0.05), run_eagerly=embedding is in_keras)
        histories.append(model.fit(IDS, ONE, epochs=2, batch_size=8, shuffle=False, verbose=0).history["loss"])
    np.testing.assert_allclose(histories[0], histories[1], rtol=1e-5)


def test_eager_models_take_one_kind_of_term_and_refuse_several() -> None:
    eager, graph = (fitted(one_a_record, mse("sum"), "mean", run_eagerly=eagerly) for eagerly in (True, False))
    for weight, other in zip(eager.weights, graph.weights, strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-5)
    with pytest.raises(Unsupported, match="leave run_eagerly out"):
        fitted(lambda e: one_a_record(e, kernel_regularizer=L2), mse("sum"), "mean", run_eagerly=True)


def test_summed_micro_batches_count_a_regularizer_once() -> None:
    """With "sum" the loss weighs 1 a micro-batch; a penalty on weights is no loss of any."""
    start = one_a_record(in_store).get_layer("out").get_weights()[0]
    penalised, plain = (
        fitted(one_a_record if regularizer is None else regularised, "mse", "sum").get_layer("out").get_weights()[0]
        for regularizer in (L2, None)
    )
    np.testing.assert_allclose(plain - penalised, 0.05 * 2 * 0.05 * start, rtol=1e-4)


def regularised(embedding: Callable[..., keras.layers.Layer]) -> object:
    ids = keras.Input((STEPS,), dtype="int64")
    hidden = dense(4, activation="tanh")(keras.layers.Flatten()(embedding()(ids)))
    return keras.Model(ids, dense(seed=2, name="out", kernel_regularizer=L2)(hidden))


def test_a_micro_batch_that_divides_by_0_is_refused_with_the_reason() -> None:
    positives = np.ones((RECORDS, 1), np.float32)
    positives[:MICRO] = 0.0

    def loss(y: tf.Tensor, predicted: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(y * (predicted - 1) ** 2) / tf.reduce_sum(y) + tf.reduce_mean(predicted**2)

    def guarded(y: tf.Tensor, predicted: tf.Tensor) -> tf.Tensor:
        near = tf.math.divide_no_nan(tf.reduce_sum(y * (predicted - 1) ** 2), tf.reduce_sum(y))
        return near + tf.reduce_mean(predicted**2)

    for function in (loss, guarded):
        model = one_a_record(in_store)
        model.compile("sgd", function)
        settings: dict[str, Keyword] = {"batch_size": MICRO, "shuffle": False, "verbose": 0}
        if function is guarded:
            et.fit(model, IDS, positives, grads_to_wait=WAIT, **settings)
            continue
        message = r"RealDiv '.*' \(test_loss_reductions.py:[0-9]+\) divides.*is 0 here.*grads_to_wait=1.*divide_no_nan"
        with pytest.raises(NotFinite, match=message):
            et.fit(model, IDS, positives, grads_to_wait=WAIT, **settings)
