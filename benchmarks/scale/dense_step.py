"""Prints the processor seconds of a step of the click model's dense layers, on one thread: `... dense_step IDS`."""

import statistics
import sys
import time

import keras
import numpy as np
import tensorflow as tf

from benchmarks.click_job.sizes import DIM, FEATURES, HIDDEN

_STEPS = 30


def main(ids: int) -> float:
    """Seconds, the median of some steps, for `ids / FEATURES` examples; rows get their gradients, too."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    layers = [*(keras.layers.Dense(width, activation="relu") for width in HIDDEN), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((FEATURES * DIM,)), *layers])
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    random = np.random.default_rng(0)
    rows = tf.constant(random.standard_normal((ids // FEATURES, FEATURES * DIM)), tf.float32)
    clicks = tf.constant(random.integers(0, 2, (ids // FEATURES, 1)), tf.float32)

    def compute() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(rows)
            value = loss(clicks, model(rows))
        return list(tape.gradient(value, [rows, *model.trainable_variables]))

    step, took = tf.function(compute), []
    for _ in range(_STEPS):
        began = time.process_time()
        step()[-1].numpy()
        took.append(time.process_time() - began)
    return statistics.median(took)


if __name__ == "__main__":
    print(main(int(sys.argv[1])))
