"""Adadelta."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.native.update_kernel import Scalars, update_kernel
from elastable.embedding_store.optimizers.base import SlotSpec
from elastable.embedding_store.optimizers.fused.kernel_optimizer import KernelOptimizer, hyperparameters

__all__ = ["Adadelta"]


def _step(
    w: np.float32, g: np.float32, square: np.float32, change: np.float32, rate: np.float32, scalars: Scalars
) -> tuple[np.float32, np.float32, np.float32]:
    rho, share, epsilon = scalars
    a = rho * square + share * (g * g)
    d = -(np.sqrt(change + epsilon) * g / np.sqrt(a + epsilon))
    return w + rate * d, a, rho * change + share * (d * d)


class Adadelta(KernelOptimizer):
    """`a = rho a + (1 - rho) g²; d = -sqrt(b + e) g / sqrt(a + e); b = rho b + (1 - rho) d²; w += lr d`."""

    defaults = hyperparameters(learning_rate=0.001, rho=0.95, epsilon=1e-7, weight_decay=0.0)
    shares = ("rho",)
    slots = (SlotSpec("accumulated_grad", squares=True), SlotSpec("accumulated_delta_var", squares=True))
    kernel = staticmethod(update_kernel(_step, 2))

    def scalars(self, step: int, rate: np.float32) -> Scalars:
        rho, epsilon = self.single("rho", "epsilon")
        return rho, np.float32(1 - self.hyperparameters["rho"]), epsilon
