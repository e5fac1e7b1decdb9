"""Fits a model in three replicas in threads, and in one process; prints what became of it as JSON."""

import json
from collections.abc import Callable
from functools import partial

import keras
import numpy as np
import tensorflow as tf

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import Unsupported
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.host_embeddings.host_embedding import create_host_embedding
from elastable.replicas.host_embeddings.host_table import HostEmbeddingOptimizerSpec

ROWS, DIM, BATCH, REPLICAS = 20, 6, 12, 3


def model_of(rows: Callable[[keras.KerasTensor], keras.KerasTensor]) -> keras.Model:
    """The part behind the table is frozen, so that it needs no replicas to agree upon it."""
    ids = keras.Input((3,), dtype="int64")
    kernel = keras.initializers.Constant(np.linspace(-1, 1, 3 * DIM)[:, None])
    dense = keras.layers.Dense(1, kernel_initializer=kernel, activation="tanh")
    dense.trainable = False
    return keras.Model(ids, dense(keras.layers.Flatten()(rows(ids))))


def fit(strategy: str, x: object, y: object, batch: int, group: ReplicaGroup) -> Array:
    host = create_host_embedding(
        "rows", (ROWS, DIM), np.float32, strategy, HostEmbeddingOptimizerSpec(0.1, "adagrad"), "normal", group=group
    )
    model = model_of(host.lookup)
    model.compile("sgd", "mse")
    with host.register():
        model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
        model.evaluate(x, y, batch_size=batch, verbose=0)
    return host.get_embedding_tensor()


def main() -> None:
    random = np.random.default_rng(0)
    x, y = random.integers(0, ROWS, size=(5, REPLICAS, BATCH // REPLICAS, 3)), random.normal(size=(5, REPLICAS, 4, 1))

    def part(strategy: str, group: ReplicaGroup) -> Array:
        mine = x[:, group.rank].reshape(-1, 3), y[:, group.rank].reshape(-1, 1)
        return fit(strategy, *mine, BATCH // REPLICAS, group)

    def refused(group: ReplicaGroup) -> str:
        try:
            fit("TOKEN", x[0, 0], y[0, 0], 4, group)
        except Unsupported as error:
            return str(error)
        return "nothing was refused"

    tf.config.threading.set_inter_op_parallelism_threads(REPLICAS)
    # Alone before the others: CPython was seen to crash where four threads were the first to use TensorFlow.
    (whole,) = run_threads(1, lambda group: fit("TOKEN", x.reshape(-1, 3), y.reshape(-1, 1), BATCH, group))
    messages = run_threads(REPLICAS + 1, refused)
    tables = [table for s in ("TOKEN", "ENCODING") for table in run_threads(REPLICAS, partial(part, s))]
    found = {
        "differences": float(max(np.abs(table - whole).max() for table in tables)),
        "same_bits": len({table.tobytes() for table in tables}) == 1,
        "too_few": messages[0],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
