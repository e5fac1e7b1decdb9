"""How a host embedding is trained: the optimizer of its rows, its rate, and steps whose gradients are summed first.

After `HostEmbeddingOptimizerSpec` and `HostEmbeddingSGDGAOptimizerSpec` of
TensorFlow for the IPU (`tensorflow.python.ipu.embedding_ops`), whose names and
first arguments these keep.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable

from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.errors import BadSpec
from elastable.embedding_store.optimizers.registry import known_row_optimizers, row_optimizer

__all__ = ["HostEmbeddingOptimizerSpec", "HostEmbeddingSGDGAOptimizerSpec", "LearningRate"]

LearningRate = float | Callable[[int], float]
"""A number, or what gives one for the number of steps taken before (a Keras schedule does)."""


class HostEmbeddingOptimizerSpec:
    """The optimizer of a host embedding's rows.

    Attributes:
        optimizer: The optimizer of the rows, as the embedding store knows it.
        accumulation_factor: Gradients of so many lookups are summed before one step is taken.
    """

    def __init__(
        self,
        learning_rate: LearningRate,
        optimizer_name: str | None = None,
        *,
        accumulation_factor: int = 1,
        lazy: bool = True,
        **hyperparameters: float,
    ) -> None:
        """Describes it.

        Args:
            learning_rate: Of every step, or a schedule: called with the steps taken before.
                0 is an embedding that is not trained.
            optimizer_name: A fused optimizer, in any case ("SGD", "adagrad", "Adam", ...); None: "sgd".
            accumulation_factor: k of gradient accumulation, at least 1.
            lazy: Whether a step moves the rows alone that have a gradient. False: all
                rows, as Keras' own dense optimizers do.
            **hyperparameters: Others of the optimizer, under Keras' names (`momentum`, `beta_1`, ...).

        Raises:
            BadSpec: an optimizer, hyperparameter, learning rate or factor that cannot be; named.
            Unsupported: `lazy=False` of an optimizer that has no dense form.
        """
        name = "sgd" if optimizer_name is None else str(optimizer_name).lower()
        fused = [known for known in known_row_optimizers() if known != "keras"]
        if name not in fused:
            raise BadSpec(
                f"host embedding optimizer {optimizer_name!r}: known optimizers are {', '.join(fused)}; None is sgd"
            )
        if not callable(learning_rate):
            _require_rate(learning_rate)
        if not isinstance(accumulation_factor, numbers.Integral) or accumulation_factor < 1:
            raise BadSpec(
                f"host embedding optimizer: accumulation_factor must be an integer of at least 1, got "
                f"{accumulation_factor!r}"
            )
        rate = 0.01 if callable(learning_rate) else float(learning_rate)
        self._learning_rate: LearningRate = learning_rate
        self.optimizer: OptimizerSpec = OptimizerSpec.of(name, lazy=lazy, learning_rate=rate, **hyperparameters)
        self.accumulation_factor: int = int(accumulation_factor)
        row_optimizer(self.optimizer)  # refuses hyperparameters that it does not know

    @property
    def trains(self) -> bool:
        """Whether steps change anything: the learning rate is not 0."""
        return callable(self._learning_rate) or float(self._learning_rate) != 0.0

    def get_learning_rate(self) -> LearningRate:
        """The learning rate, or the schedule, as it was given."""
        return self._learning_rate

    def get_accumulation_factor(self) -> int:
        """`accumulation_factor`."""
        return self.accumulation_factor

    def rate_at(self, step: int) -> float:
        """The learning rate of the step that `step` others came before.

        Raises:
            BadSpec: the schedule gave no finite number of at least 0.
        """
        if not callable(self._learning_rate):
            return float(self._learning_rate)
        given = float(self._learning_rate(step))
        _require_rate(given)
        return given

    def described(self) -> dict[str, object]:
        """What replicas have to agree upon, name by name."""
        return {
            "optimizer": self.optimizer.name,
            "hyperparameters": {key: value for key, value in self.optimizer.hyperparameters if key != "learning_rate"},
            "learning_rate": "a schedule" if callable(self._learning_rate) else float(self._learning_rate),
            "lazy": self.optimizer.lazy,
            "accumulation_factor": self.accumulation_factor,
        }


class HostEmbeddingSGDGAOptimizerSpec(HostEmbeddingOptimizerSpec):
    """SGD over sums of the gradients of several lookups."""

    def __init__(self, learning_rate: LearningRate, accumulation_factor: int) -> None:
        """Args and errors are those of `HostEmbeddingOptimizerSpec`."""
        super().__init__(learning_rate, "sgd", accumulation_factor=accumulation_factor)


def _require_rate(rate: object) -> None:
    if isinstance(rate, bool) or not isinstance(rate, numbers.Real) or not math.isfinite(rate) or rate < 0:
        raise BadSpec(
            f"host embedding optimizer: learning_rate must be a finite number of at least 0, or a schedule of them, "
            f"got {rate!r}"
        )
