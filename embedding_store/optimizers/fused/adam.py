"""Adam, AMSGrad, and AdamW (whose decay, as all decay here, is of touched rows only)."""

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
    prefetch,
    prefetch_distance,
    prefetch_line,
)
from elastable.embedding_store.optimizers.base import RowOptimizer, SlotSpec, hyperparameters, require_share
from elastable.embedding_store.optimizers.fused.power import adam_rate

__all__ = ["Adam"]

_DEFAULTS = {
    "learning_rate": 0.001,
    "beta_1": 0.9,
    "beta_2": 0.999,
    "epsilon": 1e-7,
    "amsgrad": 0.0,
    "weight_decay": 0.0,
}


class Adam(RowOptimizer):
    """`m += (g - m)(1 - b1); v += (g² - v)(1 - b2); w -= m alpha / (sqrt(v) + epsilon)`.

    `alpha = lr sqrt(1 - b2^t) / (1 - b1^t)`, t = step + 1. AMSGrad divides by
    the largest v seen.
    """

    def __init__(self, spec: OptimizerSpec) -> None:
        defaults = {**_DEFAULTS, "weight_decay": 0.004} if spec.name == "adamw" else _DEFAULTS
        values = self.hyperparameters = hyperparameters(spec, defaults)
        require_share(spec, "beta_1", values["beta_1"])
        require_share(spec, "beta_2", values["beta_2"])
        self.spec = spec
        self.default_learning_rate = values["learning_rate"]
        self._amsgrad = bool(values["amsgrad"])
        names = ("momentum", "velocity", "velocity_hat") if self._amsgrad else ("momentum", "velocity")
        self.slots = tuple(SlotSpec(name) for name in names)
        self._beta_1, self._beta_2 = values["beta_1"], values["beta_2"]
        self._epsilon = np.float32(values["epsilon"])
        self._decay = np.float32(values["weight_decay"])

    def apply(self, weights: Float32, slots: Float32, batch: UpdateBatch) -> None:
        run = _amsgrad if self._amsgrad else _adam
        run(
            weights,
            batch.weight_positions,
            slots,
            batch.positions,
            batch.gradients,
            *self.scalars(batch.step, batch.rate),
        )

    def scalars(
        self, step: int, learning_rate: float
    ) -> tuple[np.float32, np.float32, np.float32, np.float32, np.float32, np.float32]:
        """What kernels are given for a step: rate, decay, alpha, 1 - beta_1, 1 - beta_2 and epsilon."""
        rate = np.float32(learning_rate)
        alpha = adam_rate(self._beta_1, self._beta_2, step, rate)
        # 1 - beta is rounded to float32 after the subtraction, as in Keras.
        shares = np.float32(1 - self._beta_1), np.float32(1 - self._beta_2)
        return (rate, self._decay, alpha, *shares, self._epsilon)


@inlined
def _adam_rows(
    weights: Float32,
    places: Int64,
    slots: Float32,
    positions: Int64,
    gradients: Float32,
    dim: int,
    rate: np.float32,
    decay: np.float32,
    alpha: np.float32,
    share_1: np.float32,
    share_2: np.float32,
    epsilon: np.float32,
) -> None:
    count = len(gradients)
    far = prefetch_distance(dim)
    for i in range(count):
        later = min(i + far, count - 1)
        for column in range(0, min(dim, PREFETCH_VALUES), LINE_VALUES):
            prefetch_line(weights, places[later], column)
        for column in range(0, min(2 * dim, PREFETCH_VALUES), LINE_VALUES):
            prefetch_line(slots, positions[later], column)
        w = weights[places[i]]
        momenta = slots[positions[i], :dim]
        velocities = slots[positions[i], dim:]
        g = gradients[i]
        for j in range(dim):
            m = momenta[j] + (g[j] - momenta[j]) * share_1
            v = velocities[j] + (g[j] * g[j] - velocities[j]) * share_2
            momenta[j] = m
            velocities[j] = v
            x = w[j] - w[j] * decay * rate
            w[j] = x - m * alpha / (np.sqrt(v) + epsilon)


@kernel
def _adam(
    weights: Float32,
    places: Int64,
    slots: Float32,
    positions: Int64,
    gradients: Float32,
    rate: np.float32,
    decay: np.float32,
    alpha: np.float32,
    share_1: np.float32,
    share_2: np.float32,
    epsilon: np.float32,
) -> None:
    """Compiled for the common lengths of rows, and for any other."""
    dim = gradients.shape[1]
    if dim == 16:
        _adam_rows(weights, places, slots, positions, gradients, 16, rate, decay, alpha, share_1, share_2, epsilon)
    elif dim == 32:
        _adam_rows(weights, places, slots, positions, gradients, 32, rate, decay, alpha, share_1, share_2, epsilon)
    elif dim == 64:
        _adam_rows(weights, places, slots, positions, gradients, 64, rate, decay, alpha, share_1, share_2, epsilon)
    elif dim == 128:
        _adam_rows(weights, places, slots, positions, gradients, 128, rate, decay, alpha, share_1, share_2, epsilon)
    else:
        _adam_rows(weights, places, slots, positions, gradients, dim, rate, decay, alpha, share_1, share_2, epsilon)


@kernel
def _amsgrad(
    weights: Float32,
    places: Int64,
    slots: Float32,
    positions: Int64,
    gradients: Float32,
    rate: np.float32,
    decay: np.float32,
    alpha: np.float32,
    share_1: np.float32,
    share_2: np.float32,
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
        velocities = slots[positions[i], dim : 2 * dim]
        peaks = slots[positions[i], 2 * dim :]
        g = gradients[i]
        for j in range(dim):
            m = momenta[j] + (g[j] - momenta[j]) * share_1
            v = velocities[j] + (g[j] * g[j] - velocities[j]) * share_2
            largest = max(peaks[j], v)
            momenta[j] = m
            velocities[j] = v
            peaks[j] = largest
            x = w[j] - w[j] * decay * rate
            w[j] = x - m * alpha / (np.sqrt(largest) + epsilon)
