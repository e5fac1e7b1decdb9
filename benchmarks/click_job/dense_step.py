"""The dense part of the click model alone: what no parameter server can be faster than on the same cores.

Reads step counts, answers with seconds. A step is the forward and the backward pass over rows that are there already,
down to their gradients, and the update of the dense variables. Nothing is looked up, sent, or updated sparsely.

    CLICK_OPTIMIZER=SGD python -m benchmarks.click_job.dense_step
"""

import json
import os
import sys
import time

import keras
import tensorflow as tf

from benchmarks.click_job.sizes import BATCH, DIM, FEATURES, HIDDEN, LEARNING_RATE
from benchmarks.peers.workloads import THREADS


def main() -> None:
    """For every line with a number of steps on stdin, makes that many and prints their number and seconds."""
    tf.config.threading.set_intra_op_parallelism_threads(THREADS)
    dense = keras.Sequential([keras.layers.Dense(width, activation="relu") for width in HIDDEN])
    dense.add(keras.layers.Dense(1))
    dense.build((None, FEATURES * DIM))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    optimizer = getattr(keras.optimizers, os.environ["CLICK_OPTIMIZER"])(LEARNING_RATE)
    optimizer.build(dense.trainable_variables)
    rows, clicks = tf.random.normal((BATCH, FEATURES * DIM)), tf.zeros((BATCH, 1))

    @tf.function  # type: ignore[untyped-decorator]
    def step(some: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(some)
            value = loss(clicks, dense(some, training=True))
        *gradients, of_rows = tape.gradient(value, [*dense.trainable_variables, some])
        optimizer.apply(gradients, dense.trainable_variables)
        return of_rows

    for line in sys.stdin:
        began = time.perf_counter()
        for _ in range(int(line)):
            made = step(rows)
        made.numpy()
        print(json.dumps({"steps": int(line), "seconds": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    main()
