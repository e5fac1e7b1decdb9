"""Small models, and trainings of them over threads."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

from elastable.embedding_store.composite.locations import LocationSettings, TensorLocation, TensorLocationSettings
from elastable.embedding_store.contract.arrays import Array
from elastable.replicas.groups.group import CommGroup, ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.training.trainer import ReplicaTrainer
from tests.untyped import Keyword, Parsed

_BUILDING = threading.Lock()
"""Seeds are of the process: models of several threads are built one after the other."""


def sharded(least: int = 2, domain: CommGroup | None = None) -> TensorLocationSettings:
    """Settings that share every tensor of at least so many elements."""
    return TensorLocationSettings(TensorLocation("memory", True, domain), 2, least)


STATE = LocationSettings(optimizer_state=sharded())
WEIGHTS = LocationSettings(weight=sharded())
BOTH = LocationSettings(weight=sharded(), optimizer_state=sharded())


def seeded(make: Callable[[], keras.Model], seed: int = 1) -> keras.Model:
    with _BUILDING:
        keras.utils.set_random_seed(seed)
        return make()


def perceptron() -> keras.Model:
    """Kernels and biases of 30, 5, 5 and 1 elements."""
    layers = keras.layers
    return keras.Sequential([keras.Input((6,)), layers.Dense(5, "tanh"), layers.Dense(1)], name="net")


def records(count: int = 22) -> tuple[Array, Array]:
    """x float32 [count, 6], y float32 [count, 1]."""
    x = np.random.default_rng(5).normal(size=(count, 6)).astype(np.float32)
    return x, (2 * x[:, :1] - x[:, 1:2] * x[:, 2:3]).astype(np.float32)


def compiled(
    make: Callable[[], keras.Model],
    locations: LocationSettings | None,
    group: ReplicaGroup,
    optimizer: object = "adam",
    loss: object = "mse",
    seed: int = 1,
    **named: Keyword,
) -> ReplicaTrainer:
    """A replica's trainer of a seeded model; `named` as of `compile`."""
    model = seeded(make, seed)
    group.barrier()  # a training that begins puts back what it draws, under whoever still builds a model
    trainer = ReplicaTrainer(model, locations, group, seed=7)
    trainer.compile(optimizer, loss, **named)
    return trainer


def trained(
    size: int,
    locations: LocationSettings | None = None,
    make: Callable[[], object] = perceptron,
    optimizer: Callable[[], object] = lambda: keras.optimizers.Adam(0.01),
    metrics: object = None,
    then: Callable[[ReplicaTrainer], object] = lambda trainer: None,
    **fit: Keyword,
) -> list[tuple[list[Array], Parsed, Any]]:
    """Of every replica: the weights, the history, and what `then` returns."""

    def work(group: ReplicaGroup) -> tuple[list[Array], Parsed, object]:
        trainer = compiled(make, locations, group, optimizer(), metrics=metrics)
        history = trainer.fit(*records(), **{"batch_size": 4, "epochs": 2, "verbose": 0, **fit}).history
        return [np.array(weight) for weight in trainer.model.get_weights()], history, then(trainer)

    return run_threads(size, work)


def same_bits(first: Iterable[Array], second: Iterable[Array]) -> bool:
    return [array.tobytes() for array in first] == [array.tobytes() for array in second]
