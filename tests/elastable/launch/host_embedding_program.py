"""Trains a model with host embeddings over the replicas that it is started as; writes what became of it."""

import sys
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np

import elastable as et
from tests.untyped import Parsed

ROWS, DIM, BATCH, RATE = 20, 5, 15, 0.05
_random = np.random.default_rng(0)
X = _random.integers(0, ROWS, size=(60, 3))
Y = _random.normal(size=(60, 1)).astype(np.float32)


def model_of(rows: Callable[[keras.KerasTensor], keras.KerasTensor]) -> keras.Model:
    keras.utils.set_random_seed(1)
    ids = keras.Input((3,), dtype="int64")
    return keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows(ids))))


def main(home: Path) -> None:
    """Two tables in turn, one by each strategy."""
    group = et.replica_group()
    found: Parsed = {}
    for strategy in ("TOKEN", "ENCODING"):
        spec = et.HostEmbeddingOptimizerSpec(RATE, "adagrad")
        host = et.create_host_embedding(
            f"rows-{strategy}", (ROWS, DIM), np.float32, strategy, spec, "ones", group=group
        )
        model = model_of(host.lookup)
        trainer = et.ReplicaTrainer(model, group=group)
        trainer.compile(keras.optimizers.Adagrad(RATE), "mse")
        with host.register():
            trainer.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        found[strategy] = host.get_embedding_tensor()
        found[f"{strategy} kernel"] = np.asarray(model.layers[-1].kernel)
    np.savez(home / f"{group.rank}.npz", **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
