"""Nadam."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.update_kernel import Scalars, update_kernel
from elastable.embedding_store.optimizers.base import SlotSpec
from elastable.embedding_store.optimizers.fused.kernel_optimizer import KernelOptimizer, hyperparameters
from elastable.embedding_store.optimizers.fused.power import float32_power

__all__ = ["Nadam"]

_ONE = np.float32(1)


def _step(
    w: np.float32, g: np.float32, m: np.float32, v: np.float32, rate: np.float32, scalars: Scalars
) -> tuple[np.float32, np.float32, np.float32]:
    share_1, share_2, u_next, correction_next, share_now, correction_now, correction_2, epsilon = scalars
    m = m + (g - m) * share_1
    v = v + (g * g - v) * share_2
    m_hat = u_next * m / correction_next + share_now * g / correction_now
    return w - m_hat * rate / (np.sqrt(v / correction_2) + epsilon), m, v


class Nadam(KernelOptimizer):
    """Adam with Nesterov momentum and the momentum schedule of Dozat (2016).

    Keras keeps the running product of the schedule in a variable; here it is
    computed anew from the step, so the optimizer holds no state.
    """

    defaults = hyperparameters(learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-7, weight_decay=0.0)
    shares = ("beta_1", "beta_2")
    slots = (SlotSpec("momentum"), SlotSpec("velocity", squares=True))
    kernel = staticmethod(update_kernel(_step, 2))

    def scalars(self, step: int, rate: np.float32) -> Scalars:
        beta_1, beta_2 = self.hyperparameters["beta_1"], self.hyperparameters["beta_2"]
        u, u_next = _schedule(beta_1, step + 1), _schedule(beta_1, step + 2)
        product = _momentum_product(beta_1, step + 1)
        return (
            _ONE - np.float32(beta_1),
            _ONE - np.float32(beta_2),
            u_next,
            _ONE - product * u_next,
            _ONE - u,
            _ONE - product,
            _ONE - float32_power(beta_2, step + 1),
            *self.single("epsilon"),
        )


def _schedule(beta_1: float, step: int) -> np.float32:
    """float32 momentum of step t, counted from 1: `beta_1 (1 - 0.96^t / 2)`."""
    return np.float32(beta_1) * (_ONE - np.float32(0.5) * float32_power(0.96, step))


@lru_cache(maxsize=64)
def _momentum_product(beta_1: float, steps: int) -> np.float32:
    """The product of the momenta of steps 1 to `steps`, folded in float32 as Keras folds it."""
    beta, product, step = np.float32(beta_1), _ONE, 1
    while step <= steps and (decay := _ONE - np.float32(0.5) * float32_power(0.96, step)) < 1:
        product, step = product * beta * decay, step + 1
    return np.float32(_folded(product, beta, steps + 1 - step))


@kernel
def _folded(product: np.float32, factor: np.float32, times: int) -> np.float32:
    """product * factor * factor * ..., until that changes nothing: a job takes millions of steps."""
    for _ in range(times):
        before, product = product, product * factor
        if product == before:
            break
    return product
