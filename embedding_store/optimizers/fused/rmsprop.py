"""RMSprop, plain, centered, and with momentum."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.contract.update_batch import UpdateBatch
from elastable.embedding_store.native.kernel import kernel, prefetch, prefetch_distance
from elastable.embedding_store.optimizers.base import RowOptimizer, SlotSpec, hyperparameters, require_share

__all__ = ["RMSprop"]

_DEFAULTS = {
    "learning_rate": 0.001,
    "rho": 0.9,
    "momentum": 0.0,
    "epsilon": 1e-7,
    "centered": 0.0,
    "weight_decay": 0.0,
}


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

    def apply(self, weights: Float32, slots: Float32, batch: UpdateBatch) -> None:
        scalars = (np.float32(self._rho), np.float32(1 - self._rho), self._epsilon)
        arguments = (
            weights,
            batch.weight_positions,
            slots,
            batch.positions,
            batch.gradients,
            np.float32(batch.rate),
            self._decay,
            *scalars,
        )
        # A kernel each: with the cases as branches in the loop over columns, LLVM does not vectorise it.
        if self._momentum > 0:
            (_centered_momentum if self._centered else _with_momentum)(*arguments, self._momentum)
        else:
            (_centered if self._centered else _plain)(*arguments)


@kernel
def _plain(
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
        s = slots[positions[i]]
        g = gradients[i]
        for j in range(dim):
            v = rho * s[j] + share * (g[j] * g[j])
            s[j] = v
            x = w[j] - w[j] * decay * rate
            w[j] = x - rate * g[j] / np.sqrt(v + epsilon)


@kernel
def _with_momentum(
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
    momentum: np.float32,
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
            v = rho * squares[j] + share * (g[j] * g[j])
            change = momentum * changes[j] + rate * g[j] / np.sqrt(v + epsilon)
            squares[j] = v
            changes[j] = change
            x = w[j] - w[j] * decay * rate
            w[j] = x - change


@kernel
def _centered(
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
        means = slots[positions[i], dim:]
        g = gradients[i]
        for j in range(dim):
            v = rho * squares[j] + share * (g[j] * g[j])
            mean = rho * means[j] + share * g[j]
            squares[j] = v
            means[j] = mean
            x = w[j] - w[j] * decay * rate
            w[j] = x - rate * g[j] / np.sqrt(v - mean * mean + epsilon)


@kernel
def _centered_momentum(
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
    momentum: np.float32,
) -> None:
    count, dim = gradients.shape
    far = prefetch_distance(dim)
    for i in range(count):
        ahead = min(i + far, count - 1)
        prefetch(weights, places[ahead])
        prefetch(slots, positions[ahead])
        w = weights[places[i]]
        squares = slots[positions[i], :dim]
        changes = slots[positions[i], dim : 2 * dim]
        means = slots[positions[i], 2 * dim :]
        g = gradients[i]
        for j in range(dim):
            v = rho * squares[j] + share * (g[j] * g[j])
            mean = rho * means[j] + share * g[j]
            change = momentum * changes[j] + rate * g[j] / np.sqrt(v - mean * mean + epsilon)
            squares[j] = v
            means[j] = mean
            changes[j] = change
            x = w[j] - w[j] * decay * rate
            w[j] = x - change
