"""An embedding may be called wherever Keras runs a model's code; its numbers are those of plain Keras."""

import logging
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import ModelError
from elastable.jobs.job_hooks import UntrainedTables
from tests.untyped import Keyword, Keywords

USERS, ITEMS, DIM, BATCH = 20, 30, 4, 16
RANDOM = np.random.default_rng(3)
X = {"user": RANDOM.integers(0, USERS, 64), "shown": RANDOM.integers(0, ITEMS, 64)}
ITEM = RANDOM.integers(0, ITEMS, 64)  # what was bought: the label, and an id
Layer = Callable[[int, str], keras.layers.Layer]


def in_store(size: int, name: str, **arguments: Keyword) -> keras.layers.Layer:
    return et.Embedding(output_dim=DIM, input_dim=size, name=name, **arguments)


def in_keras(size: int, name: str, **arguments: object) -> keras.layers.Layer:
    return keras.layers.Embedding(size, DIM, name=name, **arguments)


class TwoTowers(keras.Model):
    """Retrieval as in TFRS: the candidate tower runs in `compute_loss`, on ids that are labels."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.users, self.items, self.biases = layer(USERS, "users"), layer(ITEMS, "items"), layer(ITEMS, "biases")
        self.tower = keras.layers.Dense(DIM, kernel_initializer=keras.initializers.GlorotUniform(seed=1))
        self.hit = keras.metrics.Mean(name="hit")

    def build(self, input_shape: dict[str, tuple[int]]) -> None:
        for layer in (self.users, self.items, self.biases):
            layer.build()
        self.tower.build((None, DIM))

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.tower(self.users(x["user"]))

    # The argument `training` may be left out.
    def compute_loss(self, x: tf.Tensor, y: tf.Tensor, y_pred: tf.Tensor, sample_weight: object) -> tf.Tensor:
        scores = tf.matmul(y_pred, self.items(y), transpose_b=True) + tf.transpose(self.biases(x["shown"])[:, :1])
        labels = tf.range(tf.shape(scores)[0])
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores))

    def compute_metrics(self, x: tf.Tensor, y: tf.Tensor, y_pred: tf.Tensor, sample_weight: object = None) -> tf.Tensor:
        self.hit.update_state(tf.reduce_sum(y_pred * self.items(x["shown"]), axis=1))
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "hit": self.hit.result()}


def compare(make: Callable[[Layer], keras.Model], loss: object, y: object, tables: dict[str, int]) -> None:
    """Trains both and compares every row, every dense weight and all logs."""
    ours, plain = make(in_store), make(in_keras)
    layers = {layer.name: layer for layer in plain._flatten_layers() if isinstance(layer, keras.layers.Embedding)}
    initial = {}
    for layer in ours._flatten_layers():
        if isinstance(layer, et.Embedding):
            initial[layer.name] = layer.read_rows(np.arange(layer.input_dim))  # type: ignore[arg-type]
            layers[layer.name].build()
            layers[layer.name].set_weights([initial[layer.name]])
    for model in (ours, plain):
        model.compile(keras.optimizers.SGD(0.2), loss)
    plain.run_eagerly = True  # for a few steps, a graph costs more
    store = MemoryStore()
    arguments: Keywords = {"epochs": 2, "batch_size": BATCH, "validation_data": (X, y), "shuffle": False}
    mine = et.fit(ours, (X, y), store=store, verbose=False, **arguments)
    theirs = plain.fit(X, y, verbose=0, **arguments)
    for name, size in tables.items():
        expected = np.asarray(layers[name].embeddings)
        assert np.abs(expected - initial[name]).max() > 1e-4
        np.testing.assert_allclose(store.lookup({name: np.arange(size)})[name], expected, rtol=1e-4, atol=1e-6)
    for mine_weight, weight in zip(ours.weights, plain.weights, strict=True):
        np.testing.assert_allclose(mine_weight, weight, rtol=1e-4, atol=1e-6)
    assert mine.history.keys() == theirs.history.keys()
    for name, values in theirs.history.items():
        if name == "hit":
            continue  # Keras computes training metrics after the update, so what they look up is one step on
        # Some are sums of numbers near 1e-5 that nearly cancel out.
        np.testing.assert_allclose(mine.history[name], values, rtol=1e-5, atol=1e-9, err_msg=name)


def test_two_towers_train_the_candidates_that_compute_loss_embeds() -> None:
    """Ids from the features and from the labels, in `compute_loss` and in `compute_metrics`; validation too."""
    compare(TwoTowers, None, ITEM, {"users": USERS, "items": ITEMS, "biases": ITEMS})


def test_a_call_under_a_tape_of_ones_own_is_an_error_and_no_constant() -> None:
    layer = et.Embedding(output_dim=DIM, input_dim=ITEMS, name="alone")
    with tf.GradientTape(), pytest.raises(ModelError, match="'alone' is called under"):
        layer(np.array([1, 2]))
    layer.trainable = False
    with tf.GradientTape():
        assert layer(np.array([1, 2])).shape == (2, DIM)


def test_keras_own_fit_trains_the_candidates_too() -> None:
    model = TwoTowers(in_keras)
    model.items = in_store(ITEMS, "items")
    model.compile("sgd")
    model.fit(X, ITEM, batch_size=BATCH, verbose=0)
    once = model.items.read_rows(np.unique(ITEM))
    model.fit(X, ITEM, batch_size=BATCH, verbose=0)
    assert (model.items.read_rows(np.unique(ITEM)) != once).any(axis=1).all()


def test_a_table_without_a_gradient_is_warned_of_by_name(caplog: pytest.LogCaptureFixture) -> None:
    class Idle(TwoTowers):
        def __init__(self, layer: Layer) -> None:
            super().__init__(layer)
            self.idle, self.frozen = layer(ITEMS, "idle"), layer(ITEMS, "frozen")
            self.frozen.trainable = False

        def build(self, input_shape: dict[str, tuple[int]]) -> None:
            super().build(input_shape)
            self.idle.build()
            self.frozen.build()

        def call(self, x: tf.Tensor) -> tf.Tensor:
            self.idle(x["shown"])
            return super().call(x) + 0.0 * self.frozen(x["shown"])

    model = Idle(in_store)
    model.compile("sgd")
    with caplog.at_level(logging.WARNING, "elastable.jobs.job_hooks"):
        et.fit(model, (X, ITEM), batch_size=BATCH, verbose=False)
    assert [record.args[0] for record in caplog.records] == ["idle"]  # type: ignore[index]


def test_only_the_first_versions_are_judged(caplog: pytest.LogCaptureFixture) -> None:
    model = TwoTowers(in_store)
    tables = UntrainedTables(model, versions=2)
    for updated in (["users"], ["items"], []):
        tables.saw(updated)
    tables.end()
    assert [record.args[1] for record in caplog.records] == ["biases"]  # type: ignore[index]


def test_steps_that_overflowed_say_nothing_of_tables(caplog: pytest.LogCaptureFixture) -> None:
    item = keras.Input((), dtype="int64")
    model = keras.Model(item, keras.layers.Dense(1)(et.Embedding(10, 2, name="rows")(item)))
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**126)
    model.compile(scaled, "mse")
    before = model.get_layer("rows").read_rows(np.arange(10))
    with caplog.at_level(logging.WARNING, "elastable.jobs.job_hooks"):
        model.fit(np.arange(9), np.full((9, 1), 1e9), batch_size=3, epochs=1, verbose=0)
    assert not caplog.records
    np.testing.assert_array_equal(model.get_layer("rows").read_rows(np.arange(10)), before)  # it has overflowed


def test_bags_that_were_empty_are_no_table_that_nothing_looks_up(caplog: pytest.LogCaptureFixture) -> None:
    bags = keras.Input((0,), dtype="int64")
    model = keras.Model(bags, keras.layers.Dense(1)(et.Embedding(10, 2, name="rows", combiner="sum")(bags)))
    model.compile("sgd", "mse")
    with caplog.at_level(logging.WARNING, "elastable.jobs.job_hooks"):
        model.fit(np.zeros((4, 0), np.int64), np.ones((4, 1)), verbose=0)
    (record,) = caplog.records
    assert "or all bags and lists of ids that it was given were empty" in record.getMessage()
