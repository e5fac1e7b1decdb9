"""Ragged and sparse columns, with weights: they train as plain Keras trains what they say."""

import keras
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.contract.arrays import Array

RECORDS, ITEMS, DIM, LONGEST = 64, 30, 4, 5
RANDOM = np.random.default_rng(0)
LENGTHS = RANDOM.integers(0, LONGEST + 1, RECORDS)
ITEM_LISTS = [RANDOM.integers(1, ITEMS, length) for length in LENGTHS]
WEIGHT_LISTS = [RANDOM.uniform(0.5, 2.0, length).astype(np.float32) for length in LENGTHS]
PRICES = RANDOM.normal(size=(RECORDS, 1)).astype(np.float32)
Y = RANDOM.normal(size=(RECORDS, 1)).astype(np.float32)
SAMPLE_WEIGHTS = RANDOM.uniform(0.5, 2.0, RECORDS).astype(np.float32)
START = np.random.default_rng(1).normal(size=(ITEMS, DIM)).astype(np.float32)


def objects(lists: list[object]) -> object:
    made = np.empty(len(lists), object)
    made[:] = lists
    return made


def padded(lists: list[Array], dtype: npt.DTypeLike) -> Array:
    dense = np.zeros((RECORDS, LONGEST), dtype)
    for row, values in enumerate(lists):
        dense[row, : len(values)] = values
    return dense


class Weighted(keras.layers.Layer):
    """The weighted mean of rows, in plain Keras, of ids that are padded with zero weights."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = keras.layers.Embedding(ITEMS, DIM, weights=[START])

    def call(self, items: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        rows = self.rows(items) * weights[..., None]
        return tf.math.divide_no_nan(tf.reduce_sum(rows, 1), tf.reduce_sum(weights, 1, keepdims=True))


def plain_model() -> keras.Model:
    items = keras.Input((LONGEST,), dtype="int64", name="items")
    weights = keras.Input((LONGEST,), name="weights")
    return compiled({"items": items, "weights": weights}, Weighted()(items, weights))


def ragged_model(sparse: bool = False) -> keras.Model:
    kind = {"sparse": True} if sparse else {"ragged": True}
    shape = (LONGEST,) if sparse else (None,)
    items = keras.Input(shape, dtype="int64", name="items", **kind)
    weights = keras.Input(shape, name="weights", **kind)
    rows = et.Embedding(ITEMS, DIM, weights=START, combiner="mean", name="items_table")(items, weights=weights)
    return compiled({"items": items, "weights": weights}, rows)


def compiled(inputs: dict[str, object], rows: object) -> keras.Model:
    price = keras.Input((1,), name="price")
    joined = keras.layers.Concatenate()([rows, price])
    model = keras.Model({**inputs, "price": price}, keras.layers.Dense(1, kernel_initializer="ones")(joined))
    model.compile(keras.optimizers.SGD(0.1), "mse", weighted_metrics=["mae"])
    return model


def arrays(kind: str) -> tf.RaggedTensor | tuple[Array, Array]:
    if kind == "objects":
        return objects(ITEM_LISTS), objects(WEIGHT_LISTS)
    items = tf.ragged.constant([record.tolist() for record in ITEM_LISTS], tf.int64)
    weights = tf.ragged.constant([record.tolist() for record in WEIGHT_LISTS], tf.float32)
    if kind == "sparse":
        shape = (RECORDS, LONGEST)
        return items.to_sparse(), tf.sparse.reset_shape(weights.to_sparse(), shape)
    return items, weights


def source(kind: str) -> tf.data.Dataset | tuple[dict[str, object], Array, Array]:
    """The records, in one of the forms that they come in."""
    items, weights = arrays("ragged" if kind == "stream" else kind)
    data = {"items": items, "weights": weights, "price": PRICES}, Y, SAMPLE_WEIGHTS
    return tf.data.Dataset.from_tensor_slices(data).ragged_batch(16) if kind == "stream" else data


@pytest.fixture(scope="module")
def keras_numbers() -> tuple[dict[str, list[float]], list[float], Array, Array]:
    model = plain_model()
    data = {"items": padded(ITEM_LISTS, np.int64), "weights": padded(WEIGHT_LISTS, np.float32), "price": PRICES}
    history = model.fit(data, Y, sample_weight=SAMPLE_WEIGHTS, epochs=2, batch_size=16, shuffle=False, verbose=0)
    evaluated = model.evaluate(data, Y, sample_weight=SAMPLE_WEIGHTS, batch_size=16, verbose=0)
    return history.history, evaluated, model.predict(data, verbose=0), np.asarray(model.weights[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["objects", "ragged", "sparse", "stream"])
def test_training_equals_plain_keras_on_padded_records(
    kind: str, keras_numbers: tuple[dict[str, list[float]], list[float], Array, Array]
) -> None:
    history, evaluated, predicted, table = keras_numbers
    model = ragged_model(sparse=kind == "sparse")
    data, store = source(kind), et.MemoryStore()
    done = et.fit(model, data, validation_data=data, epochs=2, batch_size=16, shuffle=False, store=store, verbose=False)
    np.testing.assert_allclose(done.history["loss"], history["loss"], rtol=1e-5)
    np.testing.assert_allclose(done.history["mae"], history["mae"], rtol=1e-5)
    np.testing.assert_allclose(done.history["val_loss"][-1], evaluated[0], rtol=1e-5)
    rows = store.lookup({"items_table": np.arange(ITEMS)})["items_table"]
    np.testing.assert_allclose(rows, table, rtol=1e-4, atol=1e-6)
    if kind in ("ragged", "sparse"):
        assert isinstance(data, tuple)
        x = data[0]
        np.testing.assert_allclose(model.predict(x, batch_size=16, verbose=0), predicted, rtol=1e-4, atol=1e-5)
        found = model.evaluate(x, Y, sample_weight=SAMPLE_WEIGHTS, batch_size=16, verbose=0)
        np.testing.assert_allclose(found, evaluated, rtol=1e-5)
