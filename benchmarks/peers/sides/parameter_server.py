"""The click model under TensorFlow's ParameterServerStrategy: reads step counts, answers with seconds.

One server, one or two workers and the coordinator, each in a process. The loop is that of TensorFlow's tutorial of the
strategy: every step is scheduled by itself, and steps are asynchronous. (`Model.fit` is no faster, and takes seconds to
start.)

    CLICK_ROWS=100000 CLICK_OPTIMIZER=SGD CLICK_WORKERS=1 python -m benchmarks.peers.sides.parameter_server
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import IO

import tensorflow as tf
import tf_keras

from benchmarks.click_job.draws import batches
from benchmarks.click_job.sizes import DIM, FEATURES, HIDDEN, LEARNING_RATE
from benchmarks.peers import workloads

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def main(requests: IO[str], answers: IO[str]) -> None:
    """For every line with a number of steps, trains that many and answers their number and seconds."""
    workers = int(os.environ.get("CLICK_WORKERS", "1"))
    cluster = {"chief": [_address()], "worker": [_address() for _ in range(workers)], "ps": [_address()]}
    with ExitStack() as started:
        for role in ("worker", "ps"):
            for index in range(len(cluster[role])):
                node = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.peers.sides.parameter_server", role],
                    env={**os.environ, "TF_CONFIG": _config(cluster, role, index)},
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr,
                    preexec_fn=_die_with_parent,
                )
                started.callback(node.kill)
        os.environ["TF_CONFIG"] = _config(cluster, "chief", 0)
        train = _coordinated()
        for line in requests:
            answers.write(json.dumps({"steps": int(line), "seconds": train(int(line))}) + "\n")
            answers.flush()


def _coordinated() -> Callable[[int], float]:
    """What makes so many steps on the workers, and returns the seconds they took."""
    _limit_threads()
    rows = int(os.environ["CLICK_ROWS"])
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        ids = tf_keras.Input((FEATURES,), dtype=tf.int64)
        hidden = tf_keras.layers.Flatten()(tf_keras.layers.Embedding(rows, DIM)(ids))
        for width in HIDDEN:
            hidden = tf_keras.layers.Dense(width, activation="relu")(hidden)
        model = tf_keras.Model(ids, tf_keras.layers.Dense(1)(hidden))
        optimizer = getattr(tf_keras.optimizers, os.environ["CLICK_OPTIMIZER"])(LEARNING_RATE)
        optimizer.build(model.trainable_variables)

    def records() -> tf.data.Dataset:
        drawn = batches(rows)
        return tf.data.Dataset.from_tensor_slices(drawn).repeat().prefetch(tf.data.AUTOTUNE)

    def step(some_ids: tf.Tensor, clicks: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(clicks, model(some_ids, training=True)))
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return value

    @tf.function  # type: ignore[untyped-decorator]
    def steps(iterator: Iterator[tuple[tf.Tensor, tf.Tensor]]) -> tf.Tensor:
        return strategy.run(step, args=next(iterator))

    iterator = iter(coordinator.create_per_worker_dataset(tf.function(records)))

    def train(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            coordinator.schedule(steps, args=(iterator,))
        coordinator.join()
        return time.perf_counter() - began

    return train


def _serve() -> None:
    """A worker or a parameter server, until it is killed."""
    _limit_threads()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    server = tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
    )
    server.join()


def _limit_threads() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(workloads.THREADS)
    tf.config.threading.set_inter_op_parallelism_threads(workloads.THREADS)


def _config(cluster: dict[str, list[str]], role: str, index: int) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})


def _address() -> str:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _serve()
    else:
        own = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # TensorFlow prints where it likes
        main(sys.stdin, own)
