"""RMSprop, plain, centered, and with momentum."""

from __future__ import annotations

import numpy as np

from embedding_store.kernel import kernel, prefetch
from embedding_store.row_optimizer import RowOptimizer, SlotSpec, hyperparameters, require_share
from embedding_store.spec import OptimizerSpec
from embedding_store.store import Float32, Int64

__all__ = ["RMSprop"]

_DEFAULTS = {
    "learning_rate": 0.001,
    "rho": 0.9,
    "momentum": 0.0,
    "epsilon": 1e-7,
    "centered": 0.0,
    "weight_decay": 0.0,
}
_AHEAD = 8


class RMSprop(RowOptimizer):
    """`v = rho v + (1 - rho) g²; w -= lr g / sqrt(v + epsilon)`.

    Centered subtracts the square of the averaged gradient from v; momentum
    averages the steps.
    """

    def __init__(self, spec: OptimizerSpec) -> None:
        values = self.hyperparameters = hyperparameters(spec, _DEFAULTS)
        require_share(spec, "rho", values["rho"])
        require_share(spec, "momentum", values["momentum"])
        self.spec = spec
        self.default_learning_rate = values["learning_rate"]
        has_momentum, self._centered = values["momentum"] > 0, bool(values["centered"])
        names = ["velocity"] + ["momentum"] * has_momentum + ["average_gradient"] * self._centered
        self.slots = tuple(SlotSpec(name) for name in names)
        self._rho = values["rho"]
        self._momentum = np.float32(values["momentum"])
        self._epsilon = np.float32(values["epsilon"])
        self._decay = np.float32(values["weight_decay"])

    def apply(
        self, weights: Float32, slots: Float32, positions: Int64, gradients: Float32, step: int, learning_rate: float
    ) -> None:
        """As in `RowOptimizer.apply`."""
        scalars = (np.float32(self._rho), np.float32(1 - self._rho), self._epsilon)
        arguments = (weights, slots, positions, gradients, np.float32(learning_rate), self._decay, *scalars)
        if len(self.slots) == 1:
            _plain(*arguments)
        else:
            _extended(*arguments, self._momentum, self._centered)


@kernel
def _plain(
    weights: Float32,
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
    for i in range(count):
        ahead = positions[min(i + _AHEAD, count - 1)]
        prefetch(weights, ahead)
        prefetch(slots, ahead)
        w = weights[positions[i]]
        s = slots[positions[i]]
        g = gradients[i]
        for j in range(dim):
            v = rho * s[j] + share * (g[j] * g[j])
            s[j] = v
            x = w[j] - w[j] * decay * rate
            w[j] = x - rate * g[j] / np.sqrt(v + epsilon)


@kernel
def _extended(
    weights: Float32,
    slots: Float32,
    positions: Int64,
    gradients: Float32,
    rate: np.float32,
    decay: np.float32,
    rho: np.float32,
    share: np.float32,
    epsilon: np.float32,
    momentum: np.float32,
    centered: bool,
) -> None:
    count, dim = gradients.shape
    mean_start = 2 * dim if momentum > 0 else dim
    for i in range(count):
        ahead = positions[min(i + _AHEAD, count - 1)]
        prefetch(weights, ahead)
        prefetch(slots, ahead)
        w = weights[positions[i]]
        s = slots[positions[i]]
        g = gradients[i]
        for j in range(dim):
            v = rho * s[j] + share * (g[j] * g[j])
            s[j] = v
            denominator = v + epsilon
            if centered:
                mean = rho * s[mean_start + j] + share * g[j]
                s[mean_start + j] = mean
                denominator = v - mean * mean + epsilon
            change = rate * g[j] / np.sqrt(denominator)
            if momentum > 0:
                change = momentum * s[dim + j] + change
                s[dim + j] = change
            x = w[j] - w[j] * decay * rate
            w[j] = x - change
