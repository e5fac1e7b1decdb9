"""What a micro-batch gives, and which weights of a model it is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import keras

from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.shards.server_contract import Slices
from elastable.master.api import Divisor, GradientPart, Tensor

if TYPE_CHECKING:
    from elastable.worker.step.traced.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one micro-batch; see `elastable.master.api.Push` for the shapes."""

    loss: float
    dense: tuple[Tensor, ...]
    slices: Mapping[str, Slices]
    states: tuple[Tensor, ...]
    metrics: tuple[Tensor, ...]
    divisor: Divisor | None = None
    losses: Mapping[int, float] = field(default_factory=dict)
    once: tuple[int, ...] = ()
    parts: tuple[GradientPart, ...] = ()
    not_finite: str = ""


def dense_parts(model: keras.Model, steps: StepPlan | None = None) -> tuple[list[keras.Variable], list[keras.Variable]]:
    """The weights of a model in model order: those its optimizer trains, or will train, and all others.

    The others include a dynamic loss scale (`loss_scale`).

    Args:
        model: A built model.
        steps: The plan of its own `train_step`; the first list then has the weights that its updates change.
    """
    if steps is not None and steps.several:
        return list(steps.variables), list(steps.states)
    optimizer: keras.optimizers.Optimizer = getattr(model, "optimizer", None)
    weights = variables_of(model.weights)
    variables = optimizer._trainable_variables if getattr(optimizer, "built", False) else model.trainable_weights
    known = {id(variable) for variable in variables}
    others = [each for each in weights if id(each) not in known]
    return [each for each in weights if id(each) in known], [*others, *scale_variables(optimizer)]


_KEPT = "_elastable_loss_scale"


def scale_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variable of a dynamic loss scale as a list; empty if the optimizer has none."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return []
    if optimizer.built:
        return [optimizer.dynamic_scale]
    if not hasattr(optimizer, _KEPT):
        # A worker's optimizer makes no steps: it is not built, so it allocates no moments.
        scale = keras.Variable(optimizer.initial_scale, dtype="float32", trainable=False, name="dynamic_scale")
        object.__setattr__(optimizer, _KEPT, scale)
    return [getattr(optimizer, _KEPT)]
