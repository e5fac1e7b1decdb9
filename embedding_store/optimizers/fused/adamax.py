"""Adamax."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.contract.update_batch import UpdateBatch
from elastable.embedding_store.native.kernel import kernel, prefetch, prefetch_distance
from elastable.embedding_store.optimizers.base import RowOptimizer, SlotSpec, hyperparameters, require_share
from elastable.embedding_store.optimizers.fused.power import float32_power

__all__ = ["Adamax"]

_DEFAULTS = {"learning_rate": 0.001, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "weight_decay": 0.0}


class Adamax(RowOptimizer):
    """`m += (g - m)(1 - b1); u = max(b2 u, |g|); w -= lr m / ((1 - b1^t)(u + epsilon))`."""

    def __init__(self, spec: OptimizerSpec) -> None:
        values = self.hyperparameters = hyperparameters(spec, _DEFAULTS)
        require_share(spec, "beta_1", values["beta_1"])
        require_share(spec, "beta_2", values["beta_2"])
        self.spec = spec
        self.default_learning_rate = values["learning_rate"]
        self.slots = (SlotSpec("momentum"), SlotSpec("norm"))
        self._beta_1, self._beta_2 = values["beta_1"], np.float32(values["beta_2"])
        self._epsilon = np.float32(values["epsilon"])
        self._decay = np.float32(values["weight_decay"])

    def apply(self, weights: Float32, slots: Float32, batch: UpdateBatch) -> None:
        correction = np.float32(1) - float32_power(self._beta_1, batch.step + 1)
        scalars = (np.float32(1 - self._beta_1), self._beta_2, correction, self._epsilon)
        _adamax(
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
def _adamax(
    weights: Float32,
    places: Int64,
    slots: Float32,
    positions: Int64,
    gradients: Float32,
    rate: np.float32,
    decay: np.float32,
    share_1: np.float32,
    beta_2: np.float32,
    correction: np.float32,
    epsilon: np.float32,
) -> None:
    count, dim = gradients.shape
    far = prefetch_distance(dim)
    for i in range(count):
        ahead = min(i + far, count - 1)
        prefetch(weights, places[ahead])
        prefetch(slots, positions[ahead])
        w = weights[places[i]]
        momenta = slots[positions[i], :dim]
        norms = slots[positions[i], dim:]
        g = gradients[i]
        for j in range(dim):
            m = momenta[j] + (g[j] - momenta[j]) * share_1
            u = max(beta_2 * norms[j], abs(g[j]))
            momenta[j] = m
            norms[j] = u
            x = w[j] - w[j] * decay * rate
            w[j] = x - rate * m / (correction * (u + epsilon))
