"""The click model with recommenders-addons' table in Redis: reads step counts, answers with seconds.

CLICK_ROWS=100000 CLICK_OPTIMIZER=SGD CLICK_REDIS=127.0.0.1:6379 python -m benchmarks.peers.sides.recommenders_click
"""

import json
import os
import sys
import time
from itertools import cycle
from typing import IO

import tensorflow as tf
import tf_keras
from tensorflow_recommenders_addons import dynamic_embedding as de

from benchmarks.click_job.draws import batches
from benchmarks.click_job.sizes import DIM, FEATURES, HIDDEN, LEARNING_RATE
from benchmarks.peers import workloads
from benchmarks.peers.sides.recommenders import redis_creator

_PARTITIONS = 16


def main(requests: IO[str], answers: IO[str]) -> None:
    """For every line with a number of steps, trains that many and answers their number and seconds."""
    tf.config.threading.set_intra_op_parallelism_threads(workloads.THREADS)
    tf.config.threading.set_inter_op_parallelism_threads(workloads.THREADS)
    rows, optimizer = int(os.environ["CLICK_ROWS"]), os.environ["CLICK_OPTIMIZER"]
    step = _step(optimizer)
    ids, clicks = batches(rows)
    turns = cycle([(tf.constant(some), tf.constant(of)) for some, of in zip(ids, clicks, strict=True)])
    for line in requests:
        began = time.perf_counter()
        for _ in range(int(line)):
            step(*next(turns))
        answers.write(json.dumps({"steps": int(line), "seconds": time.perf_counter() - began}) + "\n")
        answers.flush()


def _step(name: str) -> tf.types.experimental.PolymorphicFunction:
    table = de.keras.layers.Embedding(
        embedding_size=DIM,
        key_dtype=tf.int64,
        value_dtype=tf.float32,
        initializer=tf_keras.initializers.RandomUniform(-0.05, 0.05),
        name=f"features_{name}",
        init_capacity=0,
        kv_creator=redis_creator(os.environ["CLICK_REDIS"], _PARTITIONS, f"click-{name}"),
        with_unique=True,
    )
    dense = [tf_keras.layers.Dense(width, activation="relu") for width in HIDDEN] + [tf_keras.layers.Dense(1)]
    optimizer = de.DynamicEmbeddingOptimizer(getattr(tf_keras.optimizers, name)(LEARNING_RATE))
    ids = tf_keras.Input((FEATURES,), dtype=tf.int64)
    hidden = tf_keras.layers.Flatten()(table(ids))
    for layer in dense:
        hidden = layer(hidden)
    model = tf_keras.Model(ids, hidden)

    @tf.function  # type: ignore[untyped-decorator]
    def step(some: tf.Tensor, clicks: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(clicks, model(some, training=True)))
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return value

    return step


if __name__ == "__main__":
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # TensorFlow prints where it likes
    main(sys.stdin, own)
