"""RMSprop, plain, centered, and with momentum."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.native.update_kernel import Scalars, update_kernel
from elastable.embedding_store.optimizers.base import SlotSpec
from elastable.embedding_store.optimizers.fused.kernel_optimizer import KernelOptimizer, hyperparameters

__all__ = ["RMSprop"]

# A kernel each: with the cases as branches in the loop over columns, LLVM does not vectorise it.


def _plain_step(
    w: np.float32, g: np.float32, v: np.float32, rate: np.float32, scalars: Scalars
) -> tuple[np.float32, np.float32]:
    rho, share, epsilon, _ = scalars
    v = rho * v + share * (g * g)
    return w - rate * g / np.sqrt(v + epsilon), v


def _momentum_step(
    w: np.float32, g: np.float32, v: np.float32, change: np.float32, rate: np.float32, scalars: Scalars
) -> tuple[np.float32, np.float32, np.float32]:
    rho, share, epsilon, momentum = scalars
    v = rho * v + share * (g * g)
    change = momentum * change + rate * g / np.sqrt(v + epsilon)
    return w - change, v, change


def _centered_step(
    w: np.float32, g: np.float32, v: np.float32, mean: np.float32, rate: np.float32, scalars: Scalars
) -> tuple[np.float32, np.float32, np.float32]:
    rho, share, epsilon, _ = scalars
    v = rho * v + share * (g * g)
    mean = rho * mean + share * g
    return w - rate * g / np.sqrt(v - mean * mean + epsilon), v, mean


def _centered_momentum_step(
    w: np.float32,
    g: np.float32,
    v: np.float32,
    change: np.float32,
    mean: np.float32,
    rate: np.float32,
    scalars: Scalars,
) -> tuple[np.float32, np.float32, np.float32, np.float32]:
    rho, share, epsilon, momentum = scalars
    v = rho * v + share * (g * g)
    mean = rho * mean + share * g
    change = momentum * change + rate * g / np.sqrt(v - mean * mean + epsilon)
    return w - change, v, change, mean


_PLAIN, _MOMENTUM = update_kernel(_plain_step, 1), update_kernel(_momentum_step, 2)
_CENTERED, _CENTERED_MOMENTUM = update_kernel(_centered_step, 2), update_kernel(_centered_momentum_step, 3)


class RMSprop(KernelOptimizer):
    """`v = rho v + (1 - rho) g²; w -= lr g / sqrt(v + epsilon)`.

    Centered subtracts the square of the averaged gradient from v; momentum
    averages the steps.
    """

    defaults = hyperparameters(learning_rate=0.001, rho=0.9, momentum=0.0, epsilon=1e-7, centered=0.0, weight_decay=0.0)
    shares = ("rho", "momentum")

    def __init__(self, spec: OptimizerSpec) -> None:
        super().__init__(spec)
        momentum, centered = self.hyperparameters["momentum"] > 0, bool(self.hyperparameters["centered"])
        names = ["velocity"] + ["momentum"] * momentum + ["average_gradient"] * centered
        self.slots = tuple(SlotSpec(name, squares=name == "velocity") for name in names)
        self.kernel = ((_PLAIN, _CENTERED), (_MOMENTUM, _CENTERED_MOMENTUM))[momentum][centered]

    def scalars(self, step: int, rate: np.float32) -> Scalars:
        rho, epsilon, momentum = self.single("rho", "epsilon", "momentum")
        return rho, np.float32(1 - self.hyperparameters["rho"]), epsilon, momentum
