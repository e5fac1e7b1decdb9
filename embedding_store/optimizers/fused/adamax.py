"""Adamax."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.native.update_kernel import Scalars, update_kernel
from elastable.embedding_store.optimizers.base import SlotSpec
from elastable.embedding_store.optimizers.fused.kernel_optimizer import KernelOptimizer, hyperparameters
from elastable.embedding_store.optimizers.fused.power import float32_power

__all__ = ["Adamax"]


def _step(
    w: np.float32, g: np.float32, m: np.float32, norm: np.float32, rate: np.float32, scalars: Scalars
) -> tuple[np.float32, np.float32, np.float32]:
    share_1, beta_2, correction, epsilon = scalars
    m = m + (g - m) * share_1
    norm = max(beta_2 * norm, abs(g))
    return w - rate * m / (correction * (norm + epsilon)), m, norm


class Adamax(KernelOptimizer):
    """`m += (g - m)(1 - b1); u = max(b2 u, |g|); w -= lr m / ((1 - b1^t)(u + epsilon))`."""

    defaults = hyperparameters(learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-7, weight_decay=0.0)
    shares = ("beta_1", "beta_2")
    slots = (SlotSpec("momentum"), SlotSpec("norm", squares=True))
    kernel = staticmethod(update_kernel(_step, 2))

    def scalars(self, step: int, rate: np.float32) -> Scalars:
        beta_1, (beta_2, epsilon) = self.hyperparameters["beta_1"], self.single("beta_2", "epsilon")
        return np.float32(1 - beta_1), beta_2, np.float32(1) - float32_power(beta_1, step + 1), epsilon
