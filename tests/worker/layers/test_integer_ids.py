"""Sequential models that begin with an embedding, whose ids Keras would make floats."""

from pathlib import Path

import keras
import numpy as np
import pytest

import elastable as et
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadIds

IDS = np.array([[2**24 + 1, 2], [2**53 + 1, 2**62 + 1]], np.int64)


def table() -> keras.layers.Layer:
    return et.Embedding(None, 3, name="rows")


def expected() -> Array:
    return table().read_rows(IDS.reshape(-1)).reshape(2, 2, 3)


MODELS = {
    "nested": lambda: [keras.Input((2,), dtype="int64"), keras.Sequential([table()])],
    "nested twice": lambda: [keras.Input((2,), dtype="int64"), keras.Sequential([keras.Sequential([table()])])],
    "not built": lambda: [table()],
    "not built, nested": lambda: [keras.Sequential([table()])],
    "an input of no dtype": lambda: [keras.Input((2,)), table()],
}


@pytest.mark.parametrize("name", MODELS)
def test_ids_are_exact(name: str, tmp_path: Path) -> None:
    model = keras.Sequential(MODELS[name]())
    np.testing.assert_array_equal(model(IDS), expected())
    np.testing.assert_array_equal(model.predict(IDS, verbose=0), expected())
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(keras.models.load_model(tmp_path / "model.keras").predict(IDS, verbose=0), expected())


def test_it_trains() -> None:
    inner = keras.Sequential([table(), keras.layers.Flatten()])
    model = keras.Sequential([keras.Input((2,), dtype="int64"), inner, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    et.fit(model, (IDS, np.ones((2, 1), np.float32)), verbose=False)
    assert inner.layers[0].source.row_count("rows") == 4


def test_an_input_that_others_share_stays_what_it_was_declared() -> None:
    numbers = keras.Input((2,))
    model = keras.Model(numbers, [keras.layers.Dense(1)(numbers), table()(numbers)])
    assert model.input.dtype == "float32"
    np.testing.assert_array_equal(model(np.ones((1, 2), np.float32))[1], table().read_rows([[1, 1]]))
    with pytest.raises(BadIds, match=r"'rows': id 0.5 of record 0 .*no integer"):
        model(np.full((1, 2), 0.5, np.float32))


def test_an_embedding_behind_another_layer_is_left_alone() -> None:
    with pytest.raises(BadIds, match="no integer"):
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), table()])(np.ones((1, 2), np.float32))
