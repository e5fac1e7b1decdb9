"""The dense part of the click model alone: what no parameter server can be faster than on the same cores.

Reads step counts, answers with seconds. A step is the forward and the backward pass over rows that are there already,
down to their gradients, and the update of the dense variables. Nothing is looked up, sent, or updated sparsely.

    CLICK_OPTIMIZER=SGD python -m benchmarks.click_job.dense_step
"""

import json
import os
import sys
import time
from collections.abc import Callable

import keras
import tensorflow as tf

from benchmarks.click_job.sizes import BATCH, DIM, FEATURES, HIDDEN, LEARNING_RATE
from benchmarks.peers.workloads import THREADS


def dense_steps(optimizer: str) -> Callable[[int], None]:
    """A function that makes so many steps.

    Args:
        optimizer: Its class among `keras.optimizers`.
    """
    dense = keras.Sequential([keras.layers.Dense(width, activation="relu") for width in HIDDEN])
    dense.add(keras.layers.Dense(1))
    dense.build((None, FEATURES * DIM))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    update = getattr(keras.optimizers, optimizer)(LEARNING_RATE)
    update.build(dense.trainable_variables)
    rows, clicks = tf.random.normal((BATCH, FEATURES * DIM)), tf.zeros((BATCH, 1))

    @tf.function  # type: ignore[untyped-decorator]
    def step(some: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(some)
            value = loss(clicks, dense(some, training=True))
        *gradients, of_rows = tape.gradient(value, [*dense.trainable_variables, some])
        update.apply(gradients, dense.trainable_variables)
        return of_rows

    def steps(count: int) -> None:
        for _ in range(count):
            made = step(rows)
        made.numpy()

    return steps


def main() -> None:
    """For every line with a number of steps on stdin, makes that many and prints their number and seconds."""
    tf.config.threading.set_intra_op_parallelism_threads(THREADS)
    steps = dense_steps(os.environ["CLICK_OPTIMIZER"])
    for line in sys.stdin:
        began = time.perf_counter()
        steps(int(line))
        print(json.dumps({"steps": int(line), "seconds": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    main()
