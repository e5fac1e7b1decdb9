"""SGD, plain, with momentum, and with Nesterov momentum."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.contract.update_batch import UpdateBatch
from elastable.embedding_store.native.kernel import kernel, prefetch, prefetch_distance
from elastable.embedding_store.optimizers.base import RowOptimizer, SlotSpec, hyperparameters, require_share

__all__ = ["SGD"]

_DEFAULTS = {"learning_rate": 0.01, "momentum": 0.0, "nesterov": 0.0, "weight_decay": 0.0}


class SGD(RowOptimizer):
    """`w -= lr g`; with momentum `m = mu m - lr g; w += m` (Nesterov: `w += mu m - lr g`)."""

    def __init__(self, spec: OptimizerSpec) -> None:
        values = self.hyperparameters = hyperparameters(spec, _DEFAULTS)
        require_share(spec, "momentum", values["momentum"])
        self.spec = spec
        self.default_learning_rate = values["learning_rate"]
        self.slots = (SlotSpec("momentum"),) if values["momentum"] else ()
        self._momentum = np.float32(values["momentum"])
        self._nesterov = bool(values["nesterov"])
        self._decay = np.float32(values["weight_decay"])

    def apply(self, weights: Float32, slots: Float32, batch: UpdateBatch) -> None:
        rate = np.float32(batch.rate)
        if not self.slots:
            _plain(weights, batch.weight_positions, batch.gradients, rate, self._decay)
        else:
            _momentum(
                weights,
                batch.weight_positions,
                slots,
                batch.positions,
                batch.gradients,
                rate,
                self._decay,
                self._momentum,
                self._nesterov,
            )


@kernel
def _plain(weights: Float32, places: Int64, gradients: Float32, rate: np.float32, decay: np.float32) -> None:
    count, dim = gradients.shape
    far = prefetch_distance(dim)
    for i in range(count):
        prefetch(weights, places[min(i + far, count - 1)])
        w = weights[places[i]]
        g = gradients[i]
        for j in range(dim):
            x = w[j] - w[j] * decay * rate
            w[j] = x - g[j] * rate


@kernel
def _momentum(
    weights: Float32,
    places: Int64,
    slots: Float32,
    positions: Int64,
    gradients: Float32,
    rate: np.float32,
    decay: np.float32,
    momentum: np.float32,
    nesterov: bool,
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
            x = w[j] - w[j] * decay * rate
            m = s[j] * momentum - g[j] * rate
            s[j] = m
            w[j] = x + (m * momentum - g[j] * rate if nesterov else m)
