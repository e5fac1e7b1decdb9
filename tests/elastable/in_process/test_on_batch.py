"""`train_on_batch`, `test_on_batch` and `predict_on_batch` with tables in a store: the numbers of plain Keras."""

from collections.abc import Callable

import keras
import numpy as np
import pytest

import elastable as et
from elastable.embedding_store.errors import NotFinite, Unsupported
from tests.elastable import gan_job

ROWS, DIM, BATCH = 30, 4, 8
RANDOM = np.random.default_rng(3)
X = RANDOM.integers(0, ROWS, (40, 3))
Y = (X[:, 0] % 2 == 0).astype(np.float32)
WEIGHTS = RANDOM.random(40).astype(np.float32)


def program(layer: Callable[..., object], optimizer: object = None, **compiled: object) -> keras.Model:
    """The same program for either layer: one seed, nothing else given."""
    keras.utils.set_random_seed(7)
    model = keras.Sequential([
        keras.Input((3,), dtype="int64"),
        layer(ROWS, DIM, name="items"),
        keras.layers.Flatten(),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(1, activation="sigmoid"),
    ])  # fmt: skip
    model.compile(optimizer or keras.optimizers.SGD(0.5), "binary_crossentropy", **compiled)
    model.run_eagerly = layer is keras.layers.Embedding  # for a few steps, a graph costs more
    return model


def assert_same(ours: keras.Model, theirs: keras.Model) -> None:
    for mine, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


def loop(model: keras.Model) -> list[object]:
    """A loop of one's own, with batches of all forms, and `fit` between."""
    found = [
        model.train_on_batch(X[at : at + BATCH], Y[at : at + BATCH], sample_weight=WEIGHTS[at : at + BATCH])
        for at in range(0, 40, BATCH)
    ]
    found += [
        model.train_on_batch(X[:5], Y[:5]),
        model.train_on_batch(X, Y, class_weight={0: 0.5, 1: 2.0}, return_dict=True),
        model.test_on_batch(X[:5], Y[:5]),
        model.fit(X, Y, batch_size=BATCH, shuffle=False, epochs=2, verbose=0).history,
        model.train_on_batch(X[:5], Y[:5], sample_weight=WEIGHTS[:5]),
    ]
    model.get_layer("items").trainable = False
    model.compile(keras.optimizers.SGD(0.1), "mse")
    found += [model.train_on_batch(X[:BATCH], Y[:BATCH, None]) for _ in range(2)]
    return found


def flat(results: list[object]) -> list[float]:
    return [float(value) for value in keras.tree.flatten(results)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("metrics", [["accuracy", "AUC"], []])
def test_a_loop_of_batches_has_the_numbers_of_plain_keras(metrics: list[str]) -> None:
    ours, theirs = program(et.Embedding, metrics=metrics), program(keras.layers.Embedding, metrics=metrics)
    before = ours.get_layer("items").read_rows(np.arange(ROWS))
    mine, expected = loop(ours), loop(theirs)
    assert np.abs(ours.get_layer("items").read_rows(np.arange(ROWS)) - before).max() > 0.01
    keras.tree.assert_same_structure(mine, expected)
    np.testing.assert_allclose(flat(mine), flat(expected), rtol=1e-4)
    assert_same(ours, theirs)
    np.testing.assert_allclose(ours.predict_on_batch(X[:6]), theirs.predict_on_batch(X[:6]), rtol=1e-4)
    assert ours.get_metrics_result().keys() == theirs.get_metrics_result().keys()
    for name, value in theirs.get_metrics_result().items():
        assert float(ours.get_metrics_result()[name]) == pytest.approx(float(value), rel=1e-4), name


def test_a_gan_is_trained_by_the_batch() -> None:
    ours = gan_job.model()
    theirs = gan_job.model(gan_job.in_keras, gan_job.at_once_plainly)
    (z, labels), real = gan_job.DATA
    for at in range(0, 40, BATCH):
        cut = slice(at, at + BATCH)
        mine, expected = (model.train_on_batch([z[cut], labels[cut]], real[cut]) for model in (ours, theirs))
        np.testing.assert_allclose(mine, expected, rtol=1e-4)
    for weight, expected in zip(ours.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-4, atol=1e-5)


def test_what_is_not_finite_changes_nothing() -> None:
    model = program(et.Embedding, loss_weights=None)
    model.train_on_batch(X, Y)
    before, rows = model.get_weights(), model.get_layer("items").read_rows(np.arange(ROWS))
    with pytest.raises(NotFinite, match="holds NaN or Inf"):
        model.train_on_batch(X, np.full_like(Y, np.nan))
    np.testing.assert_array_equal(model.get_layer("items").read_rows(np.arange(ROWS)), rows)
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_an_update_of_several_calls_is_refused() -> None:
    model = program(et.Embedding, keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    with pytest.raises(Unsupported, match=r"train_on_batch with gradient_accumulation_steps=2.*use model\.fit"):
        model.train_on_batch(X, Y)
