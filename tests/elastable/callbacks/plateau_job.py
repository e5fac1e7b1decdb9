"""A job whose callbacks remember epochs, and make each learning rate from the one before.

Set in its environment: STOPS_AFTER, so many batches after which its process is stopped; ENDS_S, seconds that its end
takes.
"""

import os
import signal
import time

import keras
import numpy as np

import elastable as et
from tests.untyped import Parsed


class Slower(keras.callbacks.Callback):
    """Takes a tenth off the learning rate for every epoch but the first that it has seen begin and end."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[int] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.epochs.append(epoch)
        self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) * 0.9 ** (len(self.epochs) - 1)

    def state_dict(self) -> dict[str, object]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: Parsed) -> None:
        self.epochs = list(state["epochs"])


class Rates(keras.callbacks.Callback):
    """Multiplies the learning rate at the beginning and around batches; stops its process."""

    left = int(os.environ.get("STOPS_AFTER", "0"))

    def _times(self, factor: float) -> None:
        self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) * factor

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        self._times(0.5)

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        time.sleep(float(os.environ.get("ENDS_S", "0")))

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self._times(0.97)

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self._times(0.98 if batch % 2 else 1.01)
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def model() -> keras.Model:
    words = keras.Input((3,), dtype="int64")
    rows = et.Embedding(None, 4, name="words", combiner="mean")(words)
    made = keras.Model(words, keras.layers.Dense(1, activation="sigmoid")(rows))
    made.compile(keras.optimizers.Adam(0.1), "binary_crossentropy")
    return made


def data(split: str) -> object:
    random = np.random.default_rng(0 if split == "train" else 1)
    words = random.integers(0, 40, (64, 3))
    return words, (words.sum(axis=1) % 2).astype("float32")


def callbacks() -> list[object]:
    # Nothing ever is so much better: the rate is halved after every second epoch, and the fifth one is the last.
    return [
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=2, min_delta=100.0),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.8 * rate),
        Slower(),
        Rates(),
        keras.callbacks.EarlyStopping("val_loss", patience=4, min_delta=100.0),
    ]
