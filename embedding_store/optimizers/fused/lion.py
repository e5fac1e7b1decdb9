"""Lion."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.contract.update_batch import UpdateBatch
from elastable.embedding_store.native.kernel import kernel, prefetch, prefetch_distance
from elastable.embedding_store.optimizers.base import RowOptimizer, SlotSpec, hyperparameters, require_share

__all__ = ["Lion"]

_DEFAULTS = {"learning_rate": 0.001, "beta_1": 0.9, "beta_2": 0.99, "weight_decay": 0.0}
_ONE = np.float32(1)


class Lion(RowOptimizer):
    """`w -= lr sign(b1 m + (1 - b1) g); m = b2 m + (1 - b2) g`."""

    def __init__(self, spec: OptimizerSpec) -> None:
        values = self.hyperparameters = hyperparameters(spec, _DEFAULTS)
        require_share(spec, "beta_1", values["beta_1"])
        require_share(spec, "beta_2", values["beta_2"])
        self.spec = spec
        self.default_learning_rate = values["learning_rate"]
        self.slots = (SlotSpec("momentum"),)
        self._beta_1, self._beta_2 = np.float32(values["beta_1"]), np.float32(values["beta_2"])
        self._decay = np.float32(values["weight_decay"])

    def apply(self, weights: Float32, slots: Float32, batch: UpdateBatch) -> None:
        scalars = (self._beta_1, _ONE - self._beta_1, self._beta_2, _ONE - self._beta_2)
        _lion(
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
def _lion(
    weights: Float32,
    places: Int64,
    slots: Float32,
    positions: Int64,
    gradients: Float32,
    rate: np.float32,
    decay: np.float32,
    beta_1: np.float32,
    share_1: np.float32,
    beta_2: np.float32,
    share_2: np.float32,
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
            direction = s[j] * beta_1 + g[j] * share_1
            x = w[j] - w[j] * decay * rate
            # np.sign keeps 0 and NaN as they are.
            w[j] = x - rate * np.sign(direction)
            s[j] = s[j] * beta_2 + g[j] * share_2
