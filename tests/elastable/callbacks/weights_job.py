"""A job whose callbacks read and assign all weights of the model: one version an epoch."""

from typing import Any

import keras
import numpy as np

import elastable as et

__all__ = ["EPOCHS", "RECORDS", "callbacks", "data", "model", "program"]

ROWS, DIM, RECORDS, EPOCHS = 24, 4, 72, 4
_ROWS = np.random.default_rng(1).normal(size=(ROWS, DIM)).astype("float32")


class Averaging(keras.callbacks.Callback):
    """Halves the weights before the second epoch, and ends with the mean of those of all epochs."""

    def on_train_begin(self, logs: object = None) -> None:
        self.seen: list[list[np.ndarray]] = []

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        if epoch == 1:
            self.model.set_weights([0.5 * weight for weight in self.model.get_weights()])

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        self.seen.append(self.model.get_weights())

    def on_train_end(self, logs: object = None) -> None:
        for weight, each in zip(self.model.weights, zip(*self.seen, strict=True), strict=True):
            weight.assign(np.mean(each, axis=0))


def program(kind: type[keras.layers.Layer]) -> keras.Model:
    keras.utils.set_random_seed(7)
    words = keras.Input((3,), dtype="int64")
    rows = kind(ROWS, DIM, name="words", weights=_ROWS)(words)
    made = keras.Model(words, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
    made.compile(keras.optimizers.SGD(0.2), "mse")
    return made


def model() -> keras.Model:
    return program(et.Embedding)


def callbacks() -> list[keras.callbacks.Callback]:
    return [Averaging()]


def data(split: str) -> Any:
    if split != "train":
        return None
    random = np.random.default_rng(0)
    return random.integers(0, ROWS, (RECORDS, 3)), random.normal(size=(RECORDS, 1)).astype("float32")
