"""A model with one table and one dense layer, for tests that hold it against plain Keras."""

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import elastable as et
from elastable.embedding_store.contract.arrays import Array
from tests.untyped import Keyword

ROWS, DIM = 12, 3
_RANDOM = np.random.default_rng(0)
IDS = _RANDOM.integers(0, ROWS, (32, 4))
TARGETS = _RANDOM.normal(size=(32, 1)).astype(np.float32)
START = _RANDOM.normal(size=(ROWS, DIM)).astype(np.float32)


def plain_table(rows: int = ROWS) -> keras.layers.Layer:
    # The regularizer makes Keras' gradient dense: the optimizer sums the ids that repeat in a batch, as here.
    return keras.layers.Embedding(rows, DIM, name="items", embeddings_regularizer=keras.regularizers.L2(0.0))


def own_table(rows: int | None = ROWS) -> keras.layers.Layer:
    return et.Embedding(rows, DIM, name="items")


def model_of(table: keras.layers.Layer, optimizer: object = None, **compiled: object) -> keras.Model:
    """Compiled, with the same kernel in every model; the optimizer is Adam where none is given."""
    ids = keras.Input((4,), dtype="int64")
    kernel = keras.initializers.GlorotUniform(seed=1)
    out = keras.layers.Dense(1, kernel_initializer=kernel, name="out")(keras.layers.Flatten()(table(ids)))
    model = keras.Model(ids, out)
    model.compile(optimizer or keras.optimizers.Adam(0.05), "mse", **compiled)
    return model


def train(model: keras.Model, targets: Array = TARGETS, **settings: object) -> None:
    model.fit(IDS, targets, batch_size=8, shuffle=False, verbose=0, **settings)


def by_batch(model: keras.Model) -> None:
    model.train_on_batch(IDS, TARGETS)


def by_step(model: keras.Model, optimizer: object = None, **how: Keyword) -> None:
    with et.step(model, **how) as step:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(tf.constant(IDS), training=True) - TARGETS) ** 2)
        step.apply(tape, loss, optimizer=optimizer)


def assert_as_in_keras(program: Callable[[keras.layers.Layer], keras.Model]) -> None:
    """Of a program that is given a table of either kind, and returns the model that it has trained."""
    theirs = program(plain_table())
    assert_same(program(own_table()), theirs)


def assert_same(model: keras.Model, other: keras.Model) -> None:
    for ours, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)
