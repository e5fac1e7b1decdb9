"""A model file whose commits touch few of its rows: 20 versions of two micro-batches of 8 records."""

import keras
import numpy as np

import elastable as et


def model() -> keras.Model:
    users = keras.Input((), dtype="int64", name="user_ids")
    row = et.Embedding(5_000, 4, name="users")(users)
    any_id = et.Embedding(None, 4, name="any", eviction={"max_age": 6, "every": 2})(users)
    made = keras.Model(users, keras.layers.Dense(1, activation="sigmoid")(row + any_id))
    made.compile(keras.optimizers.Adagrad(0.1), "binary_crossentropy")
    return made


def data(split: str) -> object:
    if split != "train":
        return None
    random = np.random.default_rng(3)
    return random.integers(0, 5_000, 320), random.integers(0, 2, 320).astype("float32")
