"""A job whose callbacks make each learning rate from the one before: at the beginning, in epochs, around batches."""

import os
import signal
import time

import keras

from tests.elastable.callbacks.plateau_job import data, model

__all__ = ["callbacks", "data", "model"]


class StopsAfter(keras.callbacks.Callback):
    """Has its process stopped once it has seen so many batches end."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.left = batches

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


class Rates(keras.callbacks.Callback):
    def _times(self, factor: float) -> None:
        self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) * factor

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        self._times(0.5)

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        time.sleep(3.0)  # the workers have left long before

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self._times(0.97)

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self._times(0.98 if batch % 2 else 1.01)


def callbacks() -> list[object]:
    rates = [keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.8 * rate), Rates()]
    return [*rates, StopsAfter(int(os.environ.get("STOPS_AFTER", "0")))]
