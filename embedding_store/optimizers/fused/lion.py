"""Lion."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.native.update_kernel import Scalars, update_kernel
from elastable.embedding_store.optimizers.base import SlotSpec
from elastable.embedding_store.optimizers.fused.kernel_optimizer import KernelOptimizer, hyperparameters

__all__ = ["Lion"]


def _step(
    w: np.float32, g: np.float32, m: np.float32, rate: np.float32, scalars: Scalars
) -> tuple[np.float32, np.float32]:
    beta_1, share_1, beta_2, share_2 = scalars
    # np.sign keeps 0 and NaN as they are.
    return w - rate * np.sign(m * beta_1 + g * share_1), m * beta_2 + g * share_2


class Lion(KernelOptimizer):
    """`w -= lr sign(b1 m + (1 - b1) g); m = b2 m + (1 - b2) g`."""

    defaults = hyperparameters(learning_rate=0.001, beta_1=0.9, beta_2=0.99, weight_decay=0.0)
    shares = ("beta_1", "beta_2")
    slots = (SlotSpec("momentum"),)
    kernel = staticmethod(update_kernel(_step, 1))

    def scalars(self, step: int, rate: np.float32) -> Scalars:
        (beta_1, beta_2), one = self.single("beta_1", "beta_2"), np.float32(1)
        return beta_1, one - beta_1, beta_2, one - beta_2
