"""Adam, AMSGrad, and AdamW (which, as all optimizers here, decays touched rows only)."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.native.update_kernel import Scalars, update_kernel
from elastable.embedding_store.optimizers.base import SlotSpec
from elastable.embedding_store.optimizers.fused.kernel_optimizer import KernelOptimizer, hyperparameters
from elastable.embedding_store.optimizers.fused.power import adam_rate

__all__ = ["Adam", "adam_step"]


def adam_step(
    w: np.float32, g: np.float32, m: np.float32, v: np.float32, rate: np.float32, scalars: Scalars
) -> tuple[np.float32, np.float32, np.float32]:
    """Adam's step on one value: new weight, momentum and velocity."""
    alpha, share_1, share_2, epsilon = scalars
    m = m + (g - m) * share_1
    v = v + (g * g - v) * share_2
    return w - m * alpha / (np.sqrt(v) + epsilon), m, v


def _amsgrad_step(
    w: np.float32, g: np.float32, m: np.float32, v: np.float32, peak: np.float32, rate: np.float32, scalars: Scalars
) -> tuple[np.float32, np.float32, np.float32, np.float32]:
    alpha, share_1, share_2, epsilon = scalars
    m = m + (g - m) * share_1
    v = v + (g * g - v) * share_2
    peak = peak if peak > v else v  # v also where it is no number, as in Keras
    return w - m * alpha / (np.sqrt(peak) + epsilon), m, v, peak


_ADAM = update_kernel(adam_step, 2, twice=True)
_AMSGRAD = update_kernel(_amsgrad_step, 3)


class Adam(KernelOptimizer):
    """`m += (g - m)(1 - b1); v += (g² - v)(1 - b2); w -= m alpha / (sqrt(v) + epsilon)`.

    `alpha = lr sqrt(1 - b2^t) / (1 - b1^t)`, t = step + 1. AMSGrad divides by
    the largest v seen.
    """

    defaults = hyperparameters(
        learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-7, amsgrad=0.0, weight_decay=0.0
    )
    shares = ("beta_1", "beta_2")

    def __init__(self, spec: OptimizerSpec) -> None:
        super().__init__(spec)
        amsgrad = bool(self.hyperparameters["amsgrad"])
        names = ("momentum", "velocity", "velocity_hat") if amsgrad else ("momentum", "velocity")
        self.slots = tuple(SlotSpec(name, squares=name != "momentum") for name in names)
        self.kernel = _AMSGRAD if amsgrad else _ADAM

    def scalars(self, step: int, rate: np.float32) -> Scalars:
        """alpha, 1 - beta_1, 1 - beta_2 and epsilon."""
        beta_1, beta_2 = self.hyperparameters["beta_1"], self.hyperparameters["beta_2"]
        # 1 - beta is rounded to float32 after the subtraction, as in Keras.
        shares = np.float32(1 - beta_1), np.float32(1 - beta_2)
        return adam_rate(beta_1, beta_2, step, rate), *shares, *self.single("epsilon")


class AdamW(Adam):
    """Adam with weight decay by default."""

    defaults = hyperparameters(**{**Adam.defaults, "weight_decay": 0.004})
