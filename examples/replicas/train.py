"""Trains one Keras model in several processes that shard its optimizer state and weights.

    elastable replicas -n 2 examples/replicas/train.py
    elastable replicas -n 2 examples/replicas/train.py --checkpoints runs/replicas --epochs 4    # resumes

Each process holds a part of every large variable and of its two slots of Adam;
results equal those of one process with the same batch size, up to float32
rounding.
"""

from __future__ import annotations

import argparse
import hashlib

import keras
import numpy as np

import elastable as et


def two_spirals(records: int) -> tuple[np.ndarray, np.ndarray]:
    """x float32 [records, 2] on one of two spirals; y float32 [records, 1]: which one."""
    random = np.random.default_rng(0)
    turn, which = random.uniform(0.5, 3.0, records), random.integers(0, 2, records)
    angle = 2 * np.pi * turn + np.pi * which
    x = np.stack([turn * np.cos(angle), turn * np.sin(angle)], axis=1) + random.normal(0, 0.05, (records, 2))
    return x.astype(np.float32), which[:, None].astype(np.float32)


def main() -> None:
    """Trains and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--checkpoints", help="Checkpoint directory: written after every epoch, resumed at start.")
    asked = parser.parse_args()

    group = et.replica_group()
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((2,)),
            layers.Dense(asked.width, "relu"),
            layers.Dense(asked.width, "relu"),
            layers.Dense(1, "sigmoid"),
        ]
    )
    shared = et.TensorLocationSettings(et.TensorLocation(replicated_tensor_sharding=True))
    trainer = et.ReplicaTrainer(model, et.LocationSettings(weight=shared, optimizer_state=shared), group)
    trainer.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    x, y = two_spirals(2048)
    batch_size, done, callbacks = 256, 0, []
    if asked.checkpoints:
        try:
            trainer.load(asked.checkpoints)
        except et.ElastableError as error:
            if group.rank == 0:
                print(f"from the beginning: {error}")
        done = trainer.step * batch_size // len(x)
        callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: trainer.save(asked.checkpoints))]
    if done < asked.epochs:
        trainer.fit(x, y, batch_size, asked.epochs, callbacks=callbacks, initial_epoch=done)
        held = trainer.memory()
        print(
            f"rank {group.rank} of {group.size}: {held.optimizer_state:,} of {held.whole_optimizer_state:,} bytes of "
            f"optimizer state, {held.weights + held.buffers:,} of {held.whole_weights:,} bytes of weights"
        )
    loss, accuracy = trainer.evaluate(x, y, batch_size)
    bits = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()[:16]
    print(f"rank {group.rank}: loss {loss:.6f}, accuracy {accuracy:.4f}, weights {bits}")


if __name__ == "__main__":
    main()
