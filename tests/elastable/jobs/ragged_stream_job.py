"""A job on a stream of ragged strings with weights."""

import itertools
from collections.abc import Iterator

import keras
import numpy as np

import elastable as et

SIZE, STEPS, NAMES = 8, 6, 20


def batch(number: int) -> object:
    random = np.random.default_rng(number)
    lengths = random.integers(0, 4, SIZE)
    names = np.array([f"item {n}" for n in random.integers(0, NAMES, lengths.sum())], object)
    weights = random.uniform(0.5, 2, lengths.sum()).astype(np.float32)
    x = {"items": et.RaggedArray.of_lengths(names, lengths), "weights": et.RaggedArray.of_lengths(weights, lengths)}
    return x, random.normal(size=(SIZE, 1)).astype(np.float32)


def stream(start: int = 0) -> Iterator[object]:
    yield from map(batch, itertools.count(start))


def model() -> keras.Model:
    items = keras.Input((None,), dtype="string", ragged=True, name="items")
    weights = keras.Input((None,), ragged=True, name="weights")
    rows = et.Embedding(None, 4, combiner="mean", name="items_table")(items, weights=weights)
    made = keras.Model({"items": items, "weights": weights}, keras.layers.Dense(1, kernel_initializer="ones")(rows))
    made.compile(keras.optimizers.Adagrad(0.1), "mse")
    return made


def data(split: str) -> et.Reader:
    if split == "train":
        return et.StreamReader(stream(), count=STEPS)
    return et.StreamReader(stream(1_000), count=3)
