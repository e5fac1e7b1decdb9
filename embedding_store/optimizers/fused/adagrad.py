"""Adagrad."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.contract.update_batch import UpdateBatch
from elastable.embedding_store.native.kernel import (
    LINE_VALUES,
    PREFETCH_VALUES,
    inlined,
    kernel,
    prefetch_distance,
    prefetch_line,
)
from elastable.embedding_store.optimizers.base import RowOptimizer, SlotSpec, hyperparameters

__all__ = ["Adagrad"]

_DEFAULTS = {"learning_rate": 0.001, "initial_accumulator_value": 0.1, "epsilon": 1e-7, "weight_decay": 0.0}


class Adagrad(RowOptimizer):
    """`a += g²; w -= lr g / sqrt(a + epsilon)`."""

    def __init__(self, spec: OptimizerSpec) -> None:
        values = self.hyperparameters = hyperparameters(spec, _DEFAULTS)
        self.spec = spec
        self.default_learning_rate = values["learning_rate"]
        self.slots = (SlotSpec("accumulator", values["initial_accumulator_value"]),)
        self._epsilon = np.float32(values["epsilon"])
        self._decay = np.float32(values["weight_decay"])

    def apply(self, weights: Float32, slots: Float32, batch: UpdateBatch) -> None:
        _adagrad(
            weights,
            batch.weight_positions,
            slots,
            batch.positions,
            batch.gradients,
            np.float32(batch.rate),
            self._decay,
            self._epsilon,
        )


@inlined
def _adagrad_rows(
    weights: Float32,
    places: Int64,
    slots: Float32,
    positions: Int64,
    gradients: Float32,
    dim: int,
    rate: np.float32,
    decay: np.float32,
    epsilon: np.float32,
) -> None:
    count = len(gradients)
    far = prefetch_distance(dim)
    for i in range(count):
        later = min(i + far, count - 1)
        for column in range(0, min(dim, PREFETCH_VALUES), LINE_VALUES):
            prefetch_line(weights, places[later], column)
            prefetch_line(slots, positions[later], column)
        w = weights[places[i]]
        s = slots[positions[i]]
        g = gradients[i]
        for j in range(dim):
            a = s[j] + g[j] * g[j]
            s[j] = a
            x = w[j] - w[j] * decay * rate
            w[j] = x - rate * g[j] / np.sqrt(a + epsilon)


@kernel
def _adagrad(
    weights: Float32,
    places: Int64,
    slots: Float32,
    positions: Int64,
    gradients: Float32,
    rate: np.float32,
    decay: np.float32,
    epsilon: np.float32,
) -> None:
    """Compiled for the common lengths of rows, and for any other."""
    dim = gradients.shape[1]
    if dim == 16:
        _adagrad_rows(weights, places, slots, positions, gradients, 16, rate, decay, epsilon)
    elif dim == 32:
        _adagrad_rows(weights, places, slots, positions, gradients, 32, rate, decay, epsilon)
    elif dim == 64:
        _adagrad_rows(weights, places, slots, positions, gradients, 64, rate, decay, epsilon)
    elif dim == 128:
        _adagrad_rows(weights, places, slots, positions, gradients, 128, rate, decay, epsilon)
    else:
        _adagrad_rows(weights, places, slots, positions, gradients, dim, rate, decay, epsilon)
