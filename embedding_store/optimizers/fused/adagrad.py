"""Adagrad."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.native.update_kernel import Scalars, update_kernel
from elastable.embedding_store.optimizers.base import SlotSpec
from elastable.embedding_store.optimizers.fused.kernel_optimizer import KernelOptimizer, hyperparameters

__all__ = ["Adagrad"]


def _step(
    w: np.float32, g: np.float32, square: np.float32, rate: np.float32, scalars: Scalars
) -> tuple[np.float32, np.float32]:
    a = square + g * g
    return w - rate * g / np.sqrt(a + scalars[0]), a


class Adagrad(KernelOptimizer):
    """`a += g²; w -= lr g / sqrt(a + epsilon)`."""

    defaults = hyperparameters(learning_rate=0.001, initial_accumulator_value=0.1, epsilon=1e-7, weight_decay=0.0)
    kernel = staticmethod(update_kernel(_step, 1, twice=True))

    def __init__(self, spec: OptimizerSpec) -> None:
        super().__init__(spec)
        self.slots = (SlotSpec("accumulator", self.hyperparameters["initial_accumulator_value"], squares=True),)

    def scalars(self, step: int, rate: np.float32) -> Scalars:
        return self.single("epsilon")
