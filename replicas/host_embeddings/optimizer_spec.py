"""How a host embedding is trained: optimizer, learning rate and gradient accumulation."""

import math
import numbers
from collections.abc import Callable

from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.errors import BadSpec
from elastable.embedding_store.optimizers.registry import known_row_optimizers, row_optimizer

LearningRate = float | Callable[[int], float]
"""A number, or a function of the number of steps taken before, such as a Keras schedule."""


class HostEmbeddingOptimizerSpec:
    """The optimizer of a host embedding's rows, named as in `tensorflow.python.ipu.embedding_ops`.

    Attributes:
        optimizer: The embedding store's spec of the optimizer.
        accumulation_factor: Number of lookups whose gradients are summed for one step.
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
        """Describes the training.

        Args:
            learning_rate: A number, or a schedule called with the steps taken before; 0: no training.
            optimizer_name: A fused optimizer, in any case ("SGD", "adagrad", "Adam", ...); None: "sgd".
            accumulation_factor: Number of lookups per step, at least 1.
            lazy: Whether a step updates only rows with a gradient. False: all rows, as Keras' dense optimizers.
            **hyperparameters: The optimizer's others, with Keras' names (`momentum`, `beta_1`, ...).

        Raises:
            BadSpec: an invalid optimizer, hyperparameter, learning rate or factor; names it.
            Unsupported: `lazy=False` for an optimizer without a dense form.
        """
        name = "sgd" if optimizer_name is None else str(optimizer_name).lower()
        fused = [known for known in known_row_optimizers() if known != "keras"]
        if name not in fused:
            raise BadSpec(
                f"host embedding optimizer {optimizer_name!r}: known optimizers are {', '.join(fused)}; None is sgd"
            )
        rate = 0.01 if callable(learning_rate) else _checked_rate(learning_rate)
        if not isinstance(accumulation_factor, numbers.Integral) or accumulation_factor < 1:
            raise BadSpec(
                f"host embedding optimizer: accumulation_factor must be an integer of at least 1, got "
                f"{accumulation_factor!r}"
            )
        self._learning_rate: LearningRate = learning_rate
        self.optimizer: OptimizerSpec = OptimizerSpec.of(name, lazy=lazy, learning_rate=rate, **hyperparameters)
        self.accumulation_factor: int = int(accumulation_factor)
        row_optimizer(self.optimizer)  # refuses unknown hyperparameters

    @property
    def trains(self) -> bool:
        """Whether steps change anything: the learning rate is not 0."""
        return callable(self._learning_rate) or float(self._learning_rate) != 0.0

    def get_learning_rate(self) -> LearningRate:
        """The learning rate or schedule, as given."""
        return self._learning_rate

    def get_accumulation_factor(self) -> int:
        return self.accumulation_factor

    def rate_at(self, step: int) -> float:
        """The learning rate after `step` steps. Raises BadSpec unless it is finite and at least 0."""
        rate = self._learning_rate
        return _checked_rate(float(rate(step)) if callable(rate) else rate)

    def described(self) -> dict[str, object]:
        """The JSON values that replicas must agree on, by name."""
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
        super().__init__(learning_rate, "sgd", accumulation_factor=accumulation_factor)


def _checked_rate(rate: object) -> float:
    if isinstance(rate, bool) or not isinstance(rate, numbers.Real) or not math.isfinite(rate) or rate < 0:
        raise BadSpec(
            f"host embedding optimizer: learning_rate must be a finite number of at least 0, or a schedule of them, "
            f"got {rate!r}"
        )
    return float(rate)
