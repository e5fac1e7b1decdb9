"""The model of the equality tests: shared, multi-call and combiner embeddings, and dense layers.

Read from the environment, so that every process of a job sees the same:
EQUALITY_OPTIMIZER, EQUALITY_RANDOM (BatchNormalization and Dropout too),
EQUALITY_VOCABULARY, EQUALITY_PAUSE (seconds that reading a micro-batch takes),
EQUALITY_GATE (a file: each worker reads 20 micro-batches, and more once it exists).
"""

import os
import time
from collections.abc import Callable

import keras
import numpy as np

from elastable import Embedding, NumpyReader
from elastable.worker.readers.batch.reader import Batch

RECORDS = 6400
OPTIMIZERS = {
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "clipped": lambda: keras.optimizers.Adagrad(0.1, global_clipnorm=0.5),
    "muon": lambda: keras.optimizers.Muon(0.01),  # Keras updates the rows, too: at a store server its backend is loaded
}


def records(vocabulary: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Three ids, one id and a bag of five ids a record, and a target that depends on them."""
    random = np.random.default_rng(5)
    x = {
        "triple": random.integers(0, vocabulary, (RECORDS, 3)),
        "single": random.integers(0, max(4, vocabulary // 4), (RECORDS,)),
        "bag": random.integers(0, vocabulary, (RECORDS, 5)),
    }
    y = np.sin(x["triple"].sum(axis=1) + x["single"]) + 0.1 * x["bag"].max(axis=1) / vocabulary
    return x, y.astype(np.float32)[:, np.newaxis]


class _SlowReader(NumpyReader):
    _taken = 0

    def take(self, indices: np.ndarray) -> Batch:
        self._taken += 1
        gate = os.environ.get("EQUALITY_GATE")
        while gate and self._taken > 20 and not os.path.exists(gate):
            time.sleep(0.02)
        time.sleep(float(os.environ.get("EQUALITY_PAUSE", "0")))
        return super().take(indices)


def data(split: str) -> object:
    """The first of the training records, which are enough for 50 versions."""
    if split != "train":
        return None
    x, y = records(int(os.environ["EQUALITY_VOCABULARY"]))
    return _SlowReader({name: column[: RECORDS // 2] for name, column in x.items()}, y[: RECORDS // 2])


def build(
    words: keras.layers.Layer,
    other_words: keras.layers.Layer,
    single: keras.layers.Layer,
    bag: Callable[..., object] | keras.layers.Layer,
    optimizer: str,
    random: bool,
) -> keras.Model:
    """The model over four functions from ids to rows."""
    inputs = {
        "triple": keras.Input((3,), dtype="int64", name="triple"),
        "single": keras.Input((), dtype="int64", name="single"),
        "bag": keras.Input((5,), dtype="int64", name="bag"),
    }
    flat = keras.layers.Flatten()
    parts = [
        flat(words(inputs["triple"])),
        # The same layer again, and another layer on the same table.
        words(inputs["single"]),
        flat(other_words(inputs["triple"][:, :2])),
        single(inputs["single"]),
        bag(inputs["bag"]),
    ]
    joined = keras.layers.Concatenate()(parts)
    if random:
        joined = keras.layers.Dropout(0.2)(keras.layers.BatchNormalization()(joined))
    # A sum and a penalty: micro-batches push a gradient for each, as they weigh differently.
    hidden = keras.layers.Dense(16, "tanh", name="hidden", kernel_regularizer="l2" if random else None)(joined)
    model = keras.Model(inputs, keras.layers.Dense(1, name="out")(hidden))
    loss, weight = (keras.losses.MeanSquaredError("sum"), 1.0 / 64) if random else ("mse", None)
    model.compile(OPTIMIZERS[optimizer](), loss, loss_weights=weight, metrics=["mae"])
    return model


def model() -> keras.Model:
    """The model with its tables in a store."""
    size = int(os.environ["EQUALITY_VOCABULARY"])
    return build(
        Embedding(size, 6, table="words", name="first"),
        Embedding(size, 6, table="words", name="second"),
        Embedding(max(4, size // 4), 4, "normal", name="alone"),
        Embedding(None, 5, combiner="mean", name="bags"),
        os.environ["EQUALITY_OPTIMIZER"],
        os.environ.get("EQUALITY_RANDOM", "") == "1",
    )


def plain_model(size: int, optimizer: str) -> keras.Model:
    """The same in plain Keras: one layer where two share a table, a mean where there is a combiner.

    The regularizer of weight zero makes the tables' gradients dense. Without it
    Keras 3.15 hands its optimizers IndexedSlices with an id more than once, of
    which Adagrad and Adam square every occurrence by itself instead of the sum.
    """
    zero = keras.regularizers.L2(0.0)
    words = keras.layers.Embedding(size, 6, embeddings_regularizer=zero, name="words")
    single = keras.layers.Embedding(max(4, size // 4), 4, embeddings_regularizer=zero, name="alone")
    bag = keras.layers.Embedding(size, 5, embeddings_regularizer=zero, name="bags")
    return build(words, words, single, lambda ids: keras.ops.mean(bag(ids), axis=-2), optimizer, random=False)
