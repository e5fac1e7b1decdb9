"""A model file whose rows follow every step: 24 versions of two micro-batches of 8 records; most ids come seldom."""

import keras
import numpy as np

import elastable as et


def model() -> keras.Model:
    users = keras.Input((3,), dtype="int64", name="user_ids")
    row = et.Embedding(600, 4, name="users", lazy=False, combiner="mean")(users)
    any_id = et.Embedding(None, 4, name="any", lazy=False, combiner="sum", eviction={"max_age": 9, "every": 2})(users)
    made = keras.Model(users, keras.layers.Dense(1, activation="sigmoid")(row + any_id))
    rate = keras.optimizers.schedules.CosineDecay(0.05, 20)
    made.compile(keras.optimizers.AdamW(rate, weight_decay=0.05), "binary_crossentropy")
    return made


def data(split: str) -> object:
    if split != "train":
        return None
    random = np.random.default_rng(3)
    ids = np.minimum(random.pareto(0.5, (192, 3)).astype(np.int64), 590)
    return ids, random.integers(0, 2, 192).astype("float32")
