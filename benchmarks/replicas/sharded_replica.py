"""One replica of `benchmarks.replicas.sharded_training`: a wide perceptron; rank 0 prints time and memory.

elastable replicas -n 2 -m benchmarks.replicas.sharded_replica both 2048 64
"""

import json
import resource
import statistics
import sys

import keras
import numpy as np

import elastable as et
from benchmarks.click_job.plain_keras import EpochClock
from benchmarks.processes import resident_bytes

_STEPS, _EPOCHS = 8, 5


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
    clock = EpochClock()
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
