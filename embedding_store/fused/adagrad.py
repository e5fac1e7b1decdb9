"""Adagrad."""

from __future__ import annotations

import numpy as np

from embedding_store.kernel import kernel, prefetch, prefetch_distance
from embedding_store.row_optimizer import FusedOptimizer, SlotSpec, hyperparameters
from embedding_store.spec import OptimizerSpec
from embedding_store.store import Float32, Int64

__all__ = ["Adagrad"]

_DEFAULTS = {"learning_rate": 0.001, "initial_accumulator_value": 0.1, "epsilon": 1e-7, "weight_decay": 0.0}


class Adagrad(FusedOptimizer):
    """`a += g²; w -= lr g / sqrt(a + epsilon)`."""

    def __init__(self, spec: OptimizerSpec) -> None:
        values = self.hyperparameters = hyperparameters(spec, _DEFAULTS)
        self.spec = spec
        self.default_learning_rate = values["learning_rate"]
        self.slots = (SlotSpec("accumulator", values["initial_accumulator_value"]),)
        self._epsilon = np.float32(values["epsilon"])
        self._decay = np.float32(values["weight_decay"])

    def apply_apart(
        self,
        weights: Float32,
        places: Int64,
        slots: Float32,
        positions: Int64,
        gradients: Float32,
        squares: Float32 | None,
        step: int,
        learning_rate: float,
    ) -> None:
        """As in `RowOptimizer.apply_apart`."""
        _adagrad(weights, places, slots, positions, gradients, np.float32(learning_rate), self._decay, self._epsilon)


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
    count, dim = gradients.shape
    far = prefetch_distance(dim)
    for i in range(count):
        ahead = min(i + far, count - 1)
        prefetch(weights, places[ahead])
        prefetch(slots, positions[ahead])
        w = weights[places[i]]
        s = slots[positions[i]]
        g = gradients[i]
        for j in range(dim):
            a = s[j] + g[j] * g[j]
            s[j] = a
            x = w[j] - w[j] * decay * rate
            w[j] = x - rate * g[j] / np.sqrt(a + epsilon)
