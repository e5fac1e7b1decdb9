"""The id plan: the part of a step that computes ids from a batch, as a separate compiled function.

The whole step (model, loss and metrics) is traced once; its embedding calls record their ids and return zeros. The part
of the graph that those ids need becomes a separate function, so a worker knows every id of a micro-batch before it runs
the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import BadIds, ModelError
from elastable.worker.keras.graphs import ancestors, is_stateful
from elastable.worker.keras.seeds import layers_of
from elastable.worker.keras.structures import BatchSpec, TensorBatch
from elastable.worker.rows.scope import PLANNED_ROWS, EmbeddingCall, PlanScope, entered, refuse_inner_call
from elastable.worker.rows.store_layer import StoreLayer
from elastable.worker.step.forward import forward, update_metrics
from elastable.worker.step.tensor_specs import flat_spec, pack_flat
from elastable.worker.step.traced.own_step import overrides, rehearse

__all__ = ["IdPlan", "plan_ids"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IdPlan:
    """Computes the ids of every embedding call from a batch.

    Attributes:
        layers: The layer of every call, in call order.
        planned: For every call, whether its ids can be computed before the step.
    """

    layers: tuple[StoreLayer, ...]
    planned: tuple[bool, ...]
    _function: Callable[..., list[tf.Tensor]] | None

    @property
    def tables(self) -> tuple[str, ...]:
        """The table of every planned call, in call order."""
        return tuple(layer.table_name for layer, known in zip(self.layers, self.planned, strict=True) if known)

    def ids(self, batch: TensorBatch) -> list[Int64]:
        """int64 `[n]` ids of every planned call, for a batch (x, ...) that matches the plan's spec."""
        if self._function is None:
            return []
        flat = [tf.convert_to_tensor(part) for part in tf.nest.flatten(batch, expand_composites=True)]
        try:
            return [np.ascontiguousarray(ids.numpy()) for ids in self._function(*flat)]
        except tf.errors.InvalidArgumentError as error:
            raise BadIds(f"the ids of a batch cannot be computed from its features: {_cause(error)}") from error


def _cause(error: tf.errors.OpError) -> str:
    """The message of an operation's error, without the trace of its creation."""
    lines = [line.strip() for line in str(error.message).splitlines() if line.strip()]
    message = next((line for line in lines if line.startswith("assertion failed:")), lines[-1] if lines else "")
    return message.removeprefix("assertion failed:").strip().replace("\\'", "'").replace("] [", " ").strip("[]")


def plan_ids(model: keras.Model, spec: BatchSpec, training: bool) -> IdPlan:
    """Traces the step of `model` on a batch of `spec` and extracts its id plan.

    Args:
        model: A compiled and built model.
        spec: TypeSpecs of a batch (x,), (x, y) or (x, y, sample_weight); ids may come from any of them.
        training: Whether it is a training or an evaluation step.

    Raises:
        ModelError: an embedding that is not a layer of the model.
        Unsupported: an embedding called inside a loop or a condition.
    """
    scope, method = PlanScope(), "train_step" if training else "test_step"

    def trace(*flat: tf.Tensor) -> list[tf.Tensor]:
        batch = pack_flat(spec, flat)
        with entered(scope):
            if overrides(model, method):
                rehearse(model, batch) if training else model.test_step(batch)
            else:
                done = forward(model, batch, training)
                update_metrics(model, done, done.loss)
        return []

    wrapped = tf.compat.v1.wrap_function(trace, flat_spec(spec))
    of_model = {layer.table_name for layer in layers_of(model) if hasattr(layer, "table_spec")}
    for call in scope.calls:
        if call.ids.graph is not wrapped.graph:
            refuse_inner_call(call.layer)
        if call.layer.table_name not in of_model:
            raise ModelError(
                f"embedding layer {call.layer.name!r}: the model does not know the layer, because a Lambda or a "
                "function calls it, so it would not be trained: make it an attribute of the layer that calls it"
            )
    planned = tuple(_is_plannable(call) for call in scope.calls)
    for call, known in zip(scope.calls, planned, strict=True):
        if not known:
            _log.warning(
                "embedding layer %r: its ids depend on values of the model and cannot be planned; "
                "it is looked up inside of the step, which is slower",
                call.layer.name,
            )
    layers = tuple(call.layer for call in scope.calls)
    fetched = [call.ids for call, known in zip(scope.calls, planned, strict=True) if known]
    if not fetched:
        return IdPlan(layers, planned, None)
    feeds = wrapped.inputs[: len(flat_spec(spec))]
    # Only what the ids need survives: no dropout, no moving averages, no rows.
    return IdPlan(layers, planned, wrapped.prune(list(feeds), fetched))


def _is_plannable(call: EmbeddingCall) -> bool:
    """Whether ids come from the batch alone, and from no row, variable or random number."""
    return not any(
        is_stateful(operation) or (operation.type == "Identity" and PLANNED_ROWS in operation.name.rsplit("/", 1)[-1])
        for operation in ancestors(call.ids)
    )
