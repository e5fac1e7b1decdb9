"""Batches that cannot be trained on are refused by the name of the column that is wrong."""

import logging
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput, ElastableError, NotFinite
from elastable.worker.readers.batch.reader import Batch
from tests.untyped import Keyword

ITEMS, PRICES = np.arange(32) % 7, np.linspace(0, 1, 32, dtype=np.float32)[:, None]
Y = np.ones((32, 1), np.float32)


def model() -> keras.Model:
    items, price = keras.Input((), dtype="int64", name="items"), keras.Input((1,), name="price")
    rows = keras.layers.Concatenate()([et.Embedding(None, 2)(items), price])
    made = keras.Model({"items": items, "price": price}, keras.layers.Dense(1)(rows))
    made.compile(keras.optimizers.SGD(0.01), "mse")
    return made


def fit(data: object, **more: Keyword) -> keras.callbacks.History:
    return et.fit(model(), data, **{"batch_size": 8, "verbose": False, **more})


def with_nan(array: Array, *records: int, value: float = np.nan) -> Array:
    spoilt = array.copy()
    spoilt[list(records)] = value
    return spoilt


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (({"items": ITEMS, "price": PRICES}, with_nan(Y, 17)), r"y holds NaN or Inf in 1 of its 8 .* record 17"),
        (({"items": ITEMS, "price": with_nan(PRICES, 3, 5)}, Y), r"x\['price'\] holds NaN or Inf in 2 .* record 3"),
        (({"items": ITEMS, "price": with_nan(PRICES, 9, value=np.inf)}, Y), r"is inf: x\['price'\] holds .* record 9"),
        (({"items": ITEMS, "price": PRICES}, Y, with_nan(Y[:, 0], 30)), "sample_weight holds .* such as record 30"),
    ],
)  # fmt: skip
def test_nan_is_blamed_on_the_column_that_holds_it(data: object, message: str) -> None:
    with pytest.raises(NotFinite, match=rf"{message}.*not_finite='skip'"):
        fit(data, shuffle=False)


def test_the_record_is_that_of_the_data_also_when_shuffled() -> None:
    with pytest.raises(NotFinite, match="y holds NaN or Inf in 1 of its 8 records, such as record 17"):
        fit(({"items": ITEMS, "price": PRICES}, with_nan(Y, 17)), seed=5)


def test_skipping_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        done = fit(({"items": ITEMS, "price": PRICES}, with_nan(Y, 17)), not_finite="skip")
    assert "y holds NaN or Inf" in caplog.text
    assert len(done.history["loss"]) == 1


@pytest.mark.parametrize("kind", ["ragged", "sparse", "nested"])
def test_records_of_ragged_columns_are_found(kind: str) -> None:
    from elastable.worker.step.forward import not_finite_columns

    values: tf.RaggedTensor | tf.SparseTensor = tf.ragged.constant([[1.0], [], [2.0, np.nan], [np.inf, 1.0]])
    if kind == "sparse":
        values = values.to_sparse()
    if kind == "nested":
        values = tf.ragged.constant([[[1.0]], [[], []], [[2.0], [np.nan]], [[np.inf]]])
    assert not_finite_columns([values])["x"].tolist() == [2, 3]


class Bad(et.Reader):
    """Gives what it is message to, whatever was asked for."""

    def __init__(self, give: Callable[[Array], Batch]) -> None:
        self.give = give

    def __len__(self) -> int:
        return 32

    def take(self, indices: Array) -> Batch:
        return self.give(indices)


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (lambda rows: {"items": ITEMS[rows]}, r"Bad\.take\(\) gave a dict; a batch is \(x,\)"),
        (lambda rows: (1, 2, 3, 4), "gave a tuple of 4"),
        (lambda rows: ({"items": ITEMS[rows], "price": None}, Y[rows]), r"x\['price'\] is None"),
        (lambda rows: ({"items": ITEMS[rows], "price": PRICES}, Y[rows]), r"x\['price'\] holds 32 records, and 2 were"),
        (lambda rows: ({"items": np.int64(3), "price": PRICES[rows]}, Y[rows]), r"x\['items'\] is a single value"),
        (lambda rows: ({"items": ITEMS[rows], "price": PRICES[rows][:, : 1 if rows[0] == 0 and len(rows) == 2 else 0]},
                       Y[rows]), r"x\['price'\] is float32 \[n, 0\], and float32 \[n, 1\] in the first records"),
        (lambda rows: ({"items": ITEMS[rows], "price": PRICES[rows]}, *([Y[rows]] if len(rows) == 2 else [])),
         r"holds x\['items'\], x\['price'\], and the first records of the training data x\['items'\], x\['price'\], y"),
    ],
)  # fmt: skip
def test_what_a_reader_of_ones_own_gives_wrong_is_named(give: Callable[[Array], Batch], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        fit(Bad(give), shuffle=False)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ({"items": ITEMS, "price": PRICES.astype(int)}, r"x\['price'\] is int64 \[n, 1\], and float32 \[n, 1\]"),
        ({"items": ITEMS}, r"holds x\['items'\], y, and the first .* x\['items'\], x\['price'\]"),
        ({"items": ITEMS, "price": np.repeat(PRICES, 2, 1)}, r"x\['price'\] is float32 \[n, 2\], and float32 \[n, 1\]"),
    ],
)  # fmt: skip
def test_validation_data_must_be_like_the_training_data(x: object, message: str) -> None:
    with pytest.raises(BadInput, match=f"the validation data: {message}"):
        fit(({"items": ITEMS, "price": PRICES}, Y), validation_data=(x, Y))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (tf.data.Dataset.from_tensor_slices((ITEMS, Y)), r"x: a single int64 value; .*batch a tf\.data\."),
        (({"item": ITEMS, "price": PRICES}, Y), "items"),
    ],
)  # fmt: skip
def test_datasets_of_another_structure(data: object, message: str) -> None:
    with pytest.raises(ElastableError, match=message):
        fit(data)
