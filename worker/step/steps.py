"""The plan and the steps of a model, for the backend that Keras runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import keras

from elastable.master.backend.contract import backend
from elastable.worker.keras.structures import BatchSpec
from elastable.worker.step.array_step import (
    ArrayEvaluateStep,
    ArrayIdPlan,
    ArrayInferStep,
    ArrayTrainStep,
    plan_array_ids,
)
from elastable.worker.step.id_plan import IdPlan, plan_ids
from elastable.worker.step.train_step import EvaluateStep, InferStep, Lookup, OwnTrainStep, TrainStep

if TYPE_CHECKING:
    from elastable.worker.step.step_plan import StepPlan


def make_plan(model: keras.Model, spec: BatchSpec, training: bool | None) -> IdPlan | ArrayIdPlan:
    """The id plan of the model's step on batches of `spec`; see `elastable.worker.step.id_plan.plan_ids`."""
    return plan_ids(model, spec, training) if backend().has_graphs else plan_array_ids(model, spec, training)


def make_train_step(
    model: keras.Model,
    spec: BatchSpec,
    plan: IdPlan | ArrayIdPlan,
    lookup: Lookup,
    seed: int | None,
    average: str | None = None,
    own: StepPlan | None = None,
) -> TrainStep | ArrayTrainStep:
    """The step that trains; arguments as of `elastable.worker.step.train_step.TrainStep`, `own` as its `steps`."""
    if isinstance(plan, ArrayIdPlan):
        return ArrayTrainStep(model, spec, plan, seed, average)
    return (TrainStep if own is None else OwnTrainStep)(model, spec, plan, lookup, seed, average, own)


def make_evaluate_step(
    model: keras.Model, spec: BatchSpec, plan: IdPlan | ArrayIdPlan, lookup: Lookup
) -> EvaluateStep | ArrayEvaluateStep:
    """The step that evaluates; arguments as of `make_train_step`."""
    if isinstance(plan, ArrayIdPlan):
        return ArrayEvaluateStep(model, plan)
    return EvaluateStep(model, spec, plan, lookup)


def make_infer_step(
    model: keras.Model, spec: BatchSpec, plan: IdPlan | ArrayIdPlan, lookup: Lookup
) -> InferStep | ArrayInferStep:
    """The step that predicts, of a plan for that alone; arguments as of `make_train_step`."""
    if isinstance(plan, ArrayIdPlan):
        return ArrayInferStep(model, plan)
    return InferStep(model, spec, plan, lookup)
