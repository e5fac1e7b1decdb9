"""One replica of `benchmarks.replicas.sharded_training`: a wide perceptron; rank 0 prints time and memory.

elastable replicas -n 2 -m benchmarks.replicas.sharded_replica both 2048 64
"""

import json
import resource
import statistics
import sys
import time

import keras
import numpy as np

import elastable as et
from benchmarks.tables.table_filling import resident_bytes

_STEPS, _EPOCHS = 8, 5


class _Clock(keras.callbacks.Callback):  # type: ignore[misc]
    """Seconds of every epoch, and the resident memory behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._began = 0.0

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.seconds.append(time.perf_counter() - self._began)


def main(shared: str, width: int, batch_size: int) -> None:
    """Trains.

    Args:
        shared: "none", "state" or "both" (weights, too).
        width: Of both hidden layers.
        batch_size: Records of a batch over all replicas.
    """
    group = et.replica_group()
    random = np.random.default_rng(0)
    x = random.normal(size=(_STEPS * batch_size, 64)).astype(np.float32)
    y = x[:, :1] * x[:, 1:2]
    layers = keras.layers
    before = resident_bytes()
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((64,)), layers.Dense(width, "relu"), layers.Dense(width, "relu"), layers.Dense(1)]
    )
    sharding = et.TensorLocationSettings(et.TensorLocation(replicated_tensor_sharding=shared != "none"))
    whole = et.TensorLocationSettings()
    trainer = et.ReplicaTrainer(model, et.LocationSettings(sharding if shared == "both" else whole, sharding), group)
    trainer.compile("adam", "mse")
    clock = _Clock()
    sent = group.bytes_sent
    trainer.fit(x, y, batch_size, _EPOCHS, verbose=0, callbacks=[clock])
    held = trainer.memory()
    figures = {
        "step_us": statistics.median(clock.seconds[1:]) / _STEPS * 1e6,
        "state": held.optimizer_state,
        "whole_state": held.whole_optimizer_state,
        "weights": held.weights + held.buffers,
        "sent": (group.bytes_sent - sent) / (_STEPS * _EPOCHS),
        "resident": resident_bytes() - before,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
    }
    if group.rank == 0:
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
