"""Ids beyond 2^53 stay what they are on every way into `model.fit`: no float lies between."""

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import elastable as et

IDS = (2**53 + 1, 2**62 + 3)
NEIGHBOURS = (2**53, 2**53 + 2, 2**62 + 4)  # what floats would make of them
LABEL = np.ones((1, 1), np.float32)


def _frame() -> object:
    import pandas as pd

    return pd.DataFrame({name: np.array([value], np.int64) for name, value in zip("ab", IDS, strict=True)})


@pytest.mark.parametrize(
    "data",
    [
        lambda: (np.array([IDS]), LABEL),
        lambda: (np.array([IDS], np.uint64), LABEL),
        lambda: (_frame(), LABEL),
        lambda: (tf.data.Dataset.from_tensor_slices((np.array([IDS]), LABEL)).batch(1),),
    ],
    ids=["int64", "uint64", "pandas", "tf.data"],
)
def test_the_rows_of_these_ids_are_trained_and_no_others(data: Callable[[], tuple[object, ...]]) -> None:
    ids = keras.Input((2,), dtype="int64")
    layer = et.Embedding(None, 4, name="items", combiner="mean")
    model = keras.Model(ids, keras.layers.Dense(1)(layer(ids)))
    model.compile("sgd", "mse")
    before = layer.read_rows(np.array(IDS + NEIGHBOURS))
    model.fit(*data(), verbose=0)
    changed = (layer.read_rows(np.array(IDS + NEIGHBOURS)) != before).any(axis=1)
    assert changed.tolist() == [True, True, False, False, False]
