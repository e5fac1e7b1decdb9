"""What fused optimizers share: checked hyperparameters, and one kernel that updates rows in place."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.row_data import UpdateBatch
from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.errors import BadSpec
from elastable.embedding_store.native.update_kernel import Scalars, UpdateKernel
from elastable.embedding_store.optimizers.base import RowOptimizer

__all__ = ["KernelOptimizer", "hyperparameters"]

_FLOAT32_MAX = float(np.finfo(np.float32).max)


class KernelOptimizer(RowOptimizer):
    """An optimizer whose kernel updates rows in place.

    Attributes:
        defaults: All its hyperparameters.
        shares: Those that must lie from 0 to 1.
        kernel: Updates rows.
    """

    defaults: Mapping[str, float]
    shares: tuple[str, ...] = ()
    kernel: UpdateKernel

    def __init__(self, spec: OptimizerSpec) -> None:
        """Raises `BadSpec` for an unknown hyperparameter, and for one that is not finite or out of range."""
        self.spec = spec
        values = self.hyperparameters = {**self.defaults, **_checked(spec, self.defaults)}
        for name in self.shares:
            if not 0.0 <= values[name] <= 1.0:
                raise BadSpec(f"optimizer {spec.name!r}: {name} must lie from 0 to 1, got {values[name]}")
        self.default_learning_rate = values["learning_rate"]
        self._singles = {name: np.float32(value) for name, value in values.items()}
        self._decay = self._singles["weight_decay"]

    def scalars(self, step: int, rate: np.float32) -> Scalars:
        """What the kernel takes besides learning rate and weight decay.

        Args:
            step: Optimizer steps taken before this one.
            rate: Its learning rate.
        """
        return ()

    def single(self, *names: str) -> tuple[np.float32, ...]:
        """Hyperparameters, rounded to float32."""
        return tuple(self._singles[name] for name in names)

    def apply(self, weights: Float32, slots: Float32, batch: UpdateBatch) -> None:
        rate = np.float32(batch.rate)
        scalars = rate, self._decay, self.scalars(batch.step, rate)
        self.kernel(weights.shape[1], (*batch.arrays(weights, slots), *scalars))


def hyperparameters(**values: float) -> Mapping[str, float]:
    """An optimizer's hyperparameters with their defaults."""
    return MappingProxyType(values)


def _checked(spec: OptimizerSpec, defaults: Mapping[str, float]) -> dict[str, float]:
    """The hyperparameters that a spec names."""
    named = dict(spec.hyperparameters)
    for name, value in named.items():
        if name not in defaults:
            raise BadSpec(
                f"optimizer {spec.name!r}: unknown hyperparameter {name!r} (known: {', '.join(sorted(defaults))})"
            )
        if not abs(value) <= _FLOAT32_MAX:  # NaN is not, either
            raise BadSpec(f"optimizer {spec.name!r}: {name} must be finite in float32, got {value}")
    return named
