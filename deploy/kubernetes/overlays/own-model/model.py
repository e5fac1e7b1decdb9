"""The smallest model file: `elastable train examples/minimal.py --workers 2 --epochs 3`."""

import keras
import numpy as np

import elastable as et


def model() -> keras.Model:
    baskets = keras.Input((4,), dtype="int64")
    rows = et.Embedding(None, 8, name="items", combiner="mean")(baskets)  # any int64 is an item
    liked = keras.layers.Dense(1, activation="sigmoid")(rows)
    model = keras.Model(baskets, liked)
    model.compile(keras.optimizers.Adagrad(0.1, 1e-6), "binary_crossentropy", metrics=["AUC"])
    return model


def data(split: str) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0 if split == "train" else 1)
    baskets = random.integers(0, 1_000, (20_000, 4)) * 10**12
    taste = np.random.default_rng(2).normal(size=1_000)  # of every item, hidden from the model
    return baskets, (taste[baskets // 10**12].sum(axis=1) > 0).astype("float32")
