"""The click model in plain Keras, in a separate process: reads step counts, answers with seconds.

CLICK_ROWS=100000 CLICK_OPTIMIZER=SGD python -m benchmarks.click_job.plain_keras
"""

import json
import os
import sys
import time

import keras
import tensorflow as tf

from benchmarks.click_job.draws import batches
from benchmarks.click_job.model import click_model
from benchmarks.click_job.sizes import DIM


class EpochClock(keras.callbacks.Callback):  # type: ignore[misc]
    """Times epochs without what `fit` does before and after them.

    Attributes:
        seconds: Of every epoch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.seconds.append(time.perf_counter() - self._began)


def main() -> None:
    """For every line with a number of steps on stdin, trains that many and prints their number and seconds."""
    rows = int(os.environ["CLICK_ROWS"])
    model = click_model([keras.layers.Embedding(rows, DIM, name="features")], os.environ["CLICK_OPTIMIZER"])
    stream = tf.data.Dataset.from_tensor_slices(batches(rows)).repeat().prefetch(tf.data.AUTOTUNE)
    clock = EpochClock()
    for line in sys.stdin:
        model.fit(stream, steps_per_epoch=int(line), epochs=1, verbose=0, callbacks=[clock])
        print(json.dumps({"steps": int(line), "seconds": clock.seconds[-1]}), flush=True)


if __name__ == "__main__":
    main()
