"""Nadam."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.contract.update_batch import UpdateBatch
from elastable.embedding_store.native.kernel import kernel, prefetch, prefetch_distance
from elastable.embedding_store.optimizers.base import RowOptimizer, SlotSpec, hyperparameters, require_share
from elastable.embedding_store.optimizers.fused.power import float32_power

__all__ = ["Nadam"]

_DEFAULTS = {"learning_rate": 0.001, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "weight_decay": 0.0}
_ONE = np.float32(1)


class Nadam(RowOptimizer):
    """Adam with Nesterov momentum and the momentum schedule of Dozat (2016).

    Keras keeps the running product of the schedule in a variable; here it is
    computed anew from the step, so the optimizer holds no state.
    """

    def __init__(self, spec: OptimizerSpec) -> None:
        values = self.hyperparameters = hyperparameters(spec, _DEFAULTS)
        require_share(spec, "beta_1", values["beta_1"])
        require_share(spec, "beta_2", values["beta_2"])
        self.spec = spec
        self.default_learning_rate = values["learning_rate"]
        self.slots = (SlotSpec("momentum"), SlotSpec("velocity"))
        self._beta_1, self._beta_2 = values["beta_1"], values["beta_2"]
        self._epsilon = np.float32(values["epsilon"])
        self._decay = np.float32(values["weight_decay"])

    def apply(self, weights: Float32, slots: Float32, batch: UpdateBatch) -> None:
        u, u_next = _schedule(self._beta_1, batch.step + 1), _schedule(self._beta_1, batch.step + 2)
        product = momentum_product(self._beta_1, batch.step + 1)
        scalars = (
            _ONE - np.float32(self._beta_1),
            _ONE - np.float32(self._beta_2),
            u_next,
            _ONE - product * u_next,
            _ONE - u,
            _ONE - product,
            _ONE - float32_power(self._beta_2, batch.step + 1),
            self._epsilon,
        )
        _nadam(
            weights,
            batch.weight_positions,
            slots,
            batch.positions,
            batch.gradients,
            np.float32(batch.rate),
            self._decay,
            *scalars,
        )


def _schedule(beta_1: float, step: int) -> np.float32:
    """float32 momentum of step t, counted from 1: `beta_1 (1 - 0.96^t / 2)`."""
    return np.float32(beta_1) * (_ONE - np.float32(0.5) * float32_power(0.96, step))


@lru_cache(maxsize=64)
def momentum_product(beta_1: float, steps: int) -> np.float32:
    """The product of the momenta of steps 1 to `steps`, folded in float32 as Keras folds it."""
    decays = (_ONE - np.float32(0.5) * float32_power(0.96, t) for t in range(1, steps + 1))
    product = _ONE
    for decay in decays:
        product = product * np.float32(beta_1) * decay
        if product == 0 or (decay == 1 and np.float32(beta_1) == 1):
            break
    return product


@kernel
def _nadam(
    weights: Float32,
    places: Int64,
    slots: Float32,
    positions: Int64,
    gradients: Float32,
    rate: np.float32,
    decay: np.float32,
    share_1: np.float32,
    share_2: np.float32,
    u_next: np.float32,
    correction_next: np.float32,
    share_now: np.float32,
    correction_now: np.float32,
    correction_2: np.float32,
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
        velocities = slots[positions[i], dim:]
        g = gradients[i]
        for j in range(dim):
            m = momenta[j] + (g[j] - momenta[j]) * share_1
            v = velocities[j] + (g[j] * g[j] - velocities[j]) * share_2
            momenta[j] = m
            velocities[j] = v
            m_hat = u_next * m / correction_next + share_now * g[j] / correction_now
            x = w[j] - w[j] * decay * rate
            w[j] = x - m_hat * rate / (np.sqrt(v / correction_2) + epsilon)
