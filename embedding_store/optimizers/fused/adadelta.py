"""Adadelta."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.contract.update_batch import UpdateBatch
from elastable.embedding_store.native.kernel import kernel, prefetch, prefetch_distance
from elastable.embedding_store.optimizers.base import RowOptimizer, SlotSpec, hyperparameters, require_share

__all__ = ["Adadelta"]

_DEFAULTS = {"learning_rate": 0.001, "rho": 0.95, "epsilon": 1e-7, "weight_decay": 0.0}


class Adadelta(RowOptimizer):
    """`a = rho a + (1 - rho) g²; d = -sqrt(b + e) g / sqrt(a + e); b = rho b + (1 - rho) d²; w += lr d`."""

    def __init__(self, spec: OptimizerSpec) -> None:
        values = self.hyperparameters = hyperparameters(spec, _DEFAULTS)
        require_share(spec, "rho", values["rho"])
        self.spec = spec
        self.default_learning_rate = values["learning_rate"]
        self.slots = (SlotSpec("accumulated_grad"), SlotSpec("accumulated_delta_var"))
        self._rho = values["rho"]
        self._epsilon = np.float32(values["epsilon"])
        self._decay = np.float32(values["weight_decay"])

    def apply(self, weights: Float32, slots: Float32, batch: UpdateBatch) -> None:
        scalars = (np.float32(self._rho), np.float32(1 - self._rho), self._epsilon)
        _adadelta(
            weights,
            batch.weight_positions,
            slots,
            batch.positions,
            batch.gradients,
            np.float32(batch.rate),
            self._decay,
            *scalars,
        )


@kernel
def _adadelta(
    weights: Float32,
    places: Int64,
    slots: Float32,
    positions: Int64,
    gradients: Float32,
    rate: np.float32,
    decay: np.float32,
    rho: np.float32,
    share: np.float32,
    epsilon: np.float32,
) -> None:
    count, dim = gradients.shape
    far = prefetch_distance(dim)
    for i in range(count):
        ahead = min(i + far, count - 1)
        prefetch(weights, places[ahead])
        prefetch(slots, positions[ahead])
        w = weights[places[i]]
        squares = slots[positions[i], :dim]
        changes = slots[positions[i], dim:]
        g = gradients[i]
        for j in range(dim):
            a = rho * squares[j] + share * (g[j] * g[j])
            d = -(np.sqrt(changes[j] + epsilon) * g[j] / np.sqrt(a + epsilon))
            squares[j] = a
            changes[j] = rho * changes[j] + share * (d * d)
            x = w[j] - w[j] * decay * rate
            w[j] = x + rate * d
