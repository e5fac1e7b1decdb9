"""Ids that a batch has several times (docs/fit.md): the store sums first, plain Keras on TensorFlow does not."""

import logging
from collections.abc import Callable
from functools import partial

import keras
import numpy as np
import pytest

import elastable as et
from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.master.model.keras_optimizer import FUSED_CLASSES
from tests.contracts.reference_rows import REFERENCES
from tests.untyped import Keyword

IDS, DIM, LENGTH = 12, 4, 3
SGD = keras.optimizers.SGD


def by_class(squares: bool) -> dict[str, Callable[[], keras.Optimizer]]:
    """The fused optimizers that square gradients, or those that do not."""
    return {
        kind.__name__: partial(kind, 5 * REFERENCES[name].rate)
        for kind, name in FUSED_CLASSES.items()
        if any(slot.squares for slot in row_optimizer(OptimizerSpec(name, ())).slots) == squares
    }


SQUARE_OR_CLIP: dict[str, Callable[[], keras.Optimizer]] = {
    **by_class(True),
    "clipnorm": lambda: SGD(5.0, clipnorm=0.05),
    "global_clipnorm": lambda: SGD(5.0, global_clipnorm=0.05),
    "clipvalue": lambda: SGD(0.5, clipvalue=0.01),
}
NEITHER: dict[str, Callable[[], keras.Optimizer]] = {
    **by_class(False),
    "momentum": lambda: SGD(0.1, momentum=0.9, nesterov=True),
    "gradient_accumulation_steps": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
}


class Summed(keras.layers.Embedding):
    """As plain Keras on JAX and PyTorch: the gradient of the table is dense."""

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        return keras.ops.matmul(keras.ops.one_hot(inputs, self.input_dim), self.embeddings)


def batches(times: int) -> Int64:
    """Two batches, each with every one of `IDS` ids, `times` times; int64 `[IDS times 2 / LENGTH, LENGTH]`."""
    random = np.random.default_rng(0)
    found: Int64 = np.concatenate([random.permutation(np.repeat(np.arange(IDS), times)) for _ in range(2)])
    return found.reshape(-1, LENGTH)


def trained(embedding: type[keras.layers.Layer], optimizer: keras.Optimizer, ids: Int64, **options: Keyword) -> Float32:
    draws = keras.initializers.RandomNormal(0, 0.1, seed=3)
    layer = embedding(IDS, DIM, embeddings_initializer=draws, name="items", **options)
    out = keras.layers.Dense(1, kernel_initializer=keras.initializers.RandomNormal(0, 1, seed=4), name="out")
    model = keras.Sequential([keras.Input((LENGTH,), dtype="int64"), layer, keras.layers.Flatten(), out])
    model.compile(optimizer, "mse", run_eagerly=True)
    labels = np.random.default_rng(1).normal(size=(len(ids), 1)).astype("float32")
    fit = et.fit if embedding is et.Embedding else keras.Model.fit
    fit(model, ids, labels, batch_size=len(ids) // 2, shuffle=False, verbose=0)
    if embedding is et.Embedding:
        rows: Float32 = layer.read_rows(np.arange(IDS))
        return rows
    return np.asarray(layer.embeddings)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SQUARE_OR_CLIP)
def test_gradients_of_an_id_are_summed_then_squared_or_clipped(name: str, caplog: pytest.LogCaptureFixture) -> None:
    optimizer = SQUARE_OR_CLIP[name]
    with caplog.at_level(logging.INFO, "elastable"):
        ours = trained(et.Embedding, optimizer(), batches(2))
    np.testing.assert_allclose(ours, trained(Summed, optimizer(), batches(2)), rtol=0, atol=1e-6)
    (line,) = (record.getMessage() for record in caplog.records if "several times" in record.getMessage())
    assert line.startswith("tables items: ")
    assert f" {name} " in line


@pytest.mark.parametrize("name", ["Adam", "clipnorm"])
def test_plain_keras_differs_on_tensorflow_and_not_where_no_id_repeats(name: str) -> None:
    optimizer = SQUARE_OR_CLIP[name]
    ours, plain = (
        [trained(kind, optimizer(), batches(times)) for times in (1, 2)]
        for kind in (et.Embedding, keras.layers.Embedding)
    )
    np.testing.assert_allclose(ours[0], plain[0], rtol=0, atol=1e-6)
    assert np.abs(ours[1] - plain[1]).max() > 1e-3


@pytest.mark.parametrize("name", NEITHER)
def test_without_squares_and_clipping_nothing_differs(name: str, caplog: pytest.LogCaptureFixture) -> None:
    optimizer = NEITHER[name]
    with caplog.at_level(logging.INFO, "elastable"):
        ours = trained(et.Embedding, optimizer(), batches(2))
    plain = trained(keras.layers.Embedding, optimizer(), batches(2))
    np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-6)
    assert "several times" not in caplog.text


def test_the_gradient_of_a_regularized_table_is_dense_in_plain_keras_too(caplog: pytest.LogCaptureFixture) -> None:
    adam, ids = SQUARE_OR_CLIP["Adam"], batches(2)
    with caplog.at_level(logging.INFO, "elastable"):
        ours = trained(et.Embedding, adam(), ids, embeddings_regularizer="l2")
    plain = trained(keras.layers.Embedding, adam(), ids, embeddings_regularizer="l2")
    np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-6)
    assert "several times" not in caplog.text
