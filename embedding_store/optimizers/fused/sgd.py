"""SGD, plain, with momentum, and with Nesterov momentum."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.native.update_kernel import Scalars, update_kernel
from elastable.embedding_store.optimizers.base import SlotSpec
from elastable.embedding_store.optimizers.fused.kernel_optimizer import KernelOptimizer, hyperparameters

__all__ = ["SGD"]


def _plain_step(w: np.float32, g: np.float32, rate: np.float32, scalars: Scalars) -> tuple[np.float32]:
    return (w - g * rate,)


def _momentum_step(
    w: np.float32, g: np.float32, m: np.float32, rate: np.float32, scalars: Scalars
) -> tuple[np.float32, np.float32]:
    m = m * scalars[0] - g * rate
    return w + m, m


def _nesterov_step(
    w: np.float32, g: np.float32, m: np.float32, rate: np.float32, scalars: Scalars
) -> tuple[np.float32, np.float32]:
    m = m * scalars[0] - g * rate
    return w + (m * scalars[0] - g * rate), m


_PLAIN, _MOMENTUM, _NESTEROV = (
    update_kernel(step, slots) for step, slots in ((_plain_step, 0), (_momentum_step, 1), (_nesterov_step, 1))
)


class SGD(KernelOptimizer):
    """`w -= lr g`; with momentum `m = mu m - lr g; w += m` (Nesterov: `w += mu m - lr g`)."""

    defaults = hyperparameters(learning_rate=0.01, momentum=0.0, nesterov=0.0, weight_decay=0.0)
    shares = ("momentum",)

    def __init__(self, spec: OptimizerSpec) -> None:
        super().__init__(spec)
        self.slots, self.kernel = (), _PLAIN
        if self.hyperparameters["momentum"]:
            self.slots = (SlotSpec("momentum"),)
            self.kernel = _NESTEROV if self.hyperparameters["nesterov"] else _MOMENTUM

    def scalars(self, step: int, rate: np.float32) -> Scalars:
        return self.single("momentum")
