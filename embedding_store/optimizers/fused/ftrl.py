"""Follow the regularised leader (McMahan et al., KDD 2013), with shrinkage."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.errors import BadSpec
from elastable.embedding_store.native.kernel import inlined
from elastable.embedding_store.native.update_kernel import Scalars, update_kernel
from elastable.embedding_store.optimizers.base import SlotSpec
from elastable.embedding_store.optimizers.fused.kernel_optimizer import KernelOptimizer, hyperparameters

__all__ = ["Ftrl"]


@inlined
def _regularised(
    w: np.float32,
    g: np.float32,
    linear: np.float32,
    grown: np.float32,
    before: np.float32,
    rate: np.float32,
    scalars: Scalars,
) -> tuple[np.float32, np.float32]:
    """New weight and linear term; `grown` and `before` are powers of the accumulator after and before the step."""
    l1, l2_twice, shrinkage_twice = scalars
    linear = linear + ((g + shrinkage_twice * w) - (grown - before) / rate * w)
    clipped = min(max(linear, -l1), l1)
    return (clipped - linear) / (grown / rate + l2_twice), linear


def _root_step(
    w: np.float32, g: np.float32, square: np.float32, linear: np.float32, rate: np.float32, scalars: Scalars
) -> tuple[np.float32, np.float32, np.float32]:
    """The usual power of -1/2: a root, which IEEE fixes to the bit."""
    grown = square + g * g
    weight, linear = _regularised(w, g, linear, np.sqrt(grown), np.sqrt(square), rate, scalars)
    return weight, grown, linear


def _power_step(
    w: np.float32, g: np.float32, square: np.float32, linear: np.float32, rate: np.float32, scalars: Scalars
) -> tuple[np.float32, np.float32, np.float32]:
    grown, power = square + g * g, scalars[3]
    # In double and rounded once: float32 library powers differ between machines.
    after, before = np.float32(np.float64(grown) ** power), np.float32(np.float64(square) ** power)
    weight, linear = _regularised(w, g, linear, after, before, rate, scalars[:3])
    return weight, grown, linear


_ROOT, _POWER = update_kernel(_root_step, 2), update_kernel(_power_step, 2)


class Ftrl(KernelOptimizer):
    """Keras' Ftrl; slots are the accumulator of squared gradients and the linear term."""

    defaults = hyperparameters(
        learning_rate=0.001,
        learning_rate_power=-0.5,
        initial_accumulator_value=0.1,
        l1_regularization_strength=0.0,
        l2_regularization_strength=0.0,
        l2_shrinkage_regularization_strength=0.0,
        beta=0.0,
        weight_decay=0.0,
    )

    def __init__(self, spec: OptimizerSpec) -> None:
        super().__init__(spec)
        accumulator, power = (
            self.hyperparameters[name] for name in ("initial_accumulator_value", "learning_rate_power")
        )
        if accumulator < 0:
            raise BadSpec(f"optimizer 'ftrl': initial_accumulator_value {accumulator} is below 0")
        if power > 0:
            raise BadSpec(f"optimizer 'ftrl': learning_rate_power {power} is above 0")
        self.slots = (SlotSpec("accumulator", accumulator, squares=True), SlotSpec("linear"))
        self._power = -power
        self.kernel = _ROOT if self._power == 0.5 else _POWER

    def scalars(self, step: int, rate: np.float32) -> Scalars:
        l1, l2, beta = self.single("l1_regularization_strength", "l2_regularization_strength", "beta")
        shrinkage_twice = np.float32(2 * self.hyperparameters["l2_shrinkage_regularization_strength"])
        found = l1, np.float32(2) * (l2 + beta / (np.float32(2) * rate)), shrinkage_twice
        return found if self._power == 0.5 else (*found, self._power)
