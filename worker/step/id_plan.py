"""The id plan: the part of a step that computes ids from a batch, as a separate compiled function."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import BadIds
from elastable.master.backend.lazy import tf
from elastable.worker.keras.seeds import draws_kept
from elastable.worker.keras.structures import BatchSpec, TensorBatch
from elastable.worker.losses.origins import ancestors
from elastable.worker.readers.batch.pytrees import named_parts
from elastable.worker.rows.id_values import assertion_of
from elastable.worker.rows.scope import PLANNED_ROWS, PlanScope, entered
from elastable.worker.rows.store_layer import StoreLayer
from elastable.worker.step.forward import flat_spec, forward, pack_flat, update_metrics
from elastable.worker.step.step_plan import overrides, refuse_inner_call, rehearse
from elastable.worker.step.trainable import is_constant

_log = logging.getLogger(__name__)
#: Operations that keep state and yet give the same answer for the same input.
_CONSTANT_STATE = ("Placeholder", "LookupTable", "HashTable", "VarHandleOp", "AnonymousHashTable", "Assert")
_RECORD = re.compile(r" of record (\d+) of the batch ")


@dataclass(frozen=True, slots=True)
class IdPlan:
    """Computes the ids of every embedding call from a batch.

    Attributes:
        layers: The layer of every call, in call order.
        planned: For every call, whether its ids can be computed before the step.
        tables: The table of every planned call, in call order.
        columns: The columns of the batch that planned ids are computed from.
    """

    layers: tuple[StoreLayer, ...]
    planned: tuple[bool, ...]
    tables: tuple[str, ...]
    columns: tuple[str, ...]
    _function: Callable[..., list[tf.Tensor]] | None

    def ids(self, batch: TensorBatch, numbers: Sequence[int] | Int64 | None = None) -> list[Int64]:
        """int64 `[n]` ids of every planned call.

        Args:
            batch: (x, ...) that matches the plan's spec.
            numbers: Number of each of its records, for messages; None: its place in the batch.

        Raises:
            BadIds: a value that is no id, with column, record and value.
        """
        if self._function is None:
            return []
        flat = map(tf.convert_to_tensor, tf.nest.flatten(batch, expand_composites=True))
        try:
            return [np.ascontiguousarray(ids) for ids in self._function(*flat)]
        except tf.errors.InvalidArgumentError as error:
            message = assertion_of(error) or str(error.message).splitlines()[-1]
            record = _RECORD.search(message)
            if record is not None and numbers is not None:
                message = message.replace(record[0], f" of record {numbers[int(record[1])]} ")
            raise BadIds(f"{', '.join(self.columns)}: {message}") from error


def plan_ids(model: keras.Model, spec: BatchSpec, training: bool | None) -> IdPlan:
    """Traces the step of `model` on a batch of `spec` and extracts its id plan.

    The whole step (model, loss and metrics) is traced; its embedding calls record their ids and return zeros. The part
    of the graph that those ids need becomes a separate function.

    Args:
        model: A compiled and built model.
        spec: TypeSpecs of a batch (x,), (x, y) or (x, y, sample_weight); ids may come from any of them.
        training: Whether it is a training or an evaluation step; None: it only predicts, without loss and metrics.

    Raises:
        ModelError: an embedding that is not a layer of the model.
        Unsupported: an embedding called inside a loop, a condition or a `vectorized_map`.
    """
    scope, wrapped = _traced(model, spec, training)
    for layer, ids in scope.calls:
        refuse_inner_call(layer, ids, wrapped.graph)
    calls = [(layer, ids) for layer, ids in scope.calls if not is_constant(model, layer)]
    layers = tuple(layer for layer, _ in calls)
    planned = tuple(_is_plannable(ids) for _, ids in calls)
    for layer, known in zip(layers, planned, strict=True):
        if not known:
            _log.warning(
                "embedding layer %r: its ids depend on values of the model and cannot be planned; "
                "it is looked up inside of the step, which is slower",
                layer.name,
            )
    fetched = [ids for (_, ids), known in zip(calls, planned, strict=True) if known]
    tables = tuple(layer.table_name for layer, known in zip(layers, planned, strict=True) if known)
    if not fetched:
        return IdPlan(layers, planned, tables, (), None)
    feeds = wrapped.inputs[: len(flat_spec(spec))]
    names = [name for name, part in named_parts(spec) for _ in flat_spec((part,))]
    needed = {operation for ids in fetched for operation in ancestors(ids)}
    columns = dict.fromkeys(name for name, feed in zip(names, feeds, strict=True) if feed.op in needed)
    # Only what the ids need survives: no dropout, no moving averages, no rows.
    pruned = wrapped.prune(list(feeds), fetched)
    # Called by itself, it fails at a signature that it does not have, and writes an error with all its arguments first.
    function = tf.function(lambda *flat: pruned(*flat), input_signature=flat_spec(spec), autograph=False)
    return IdPlan(layers, planned, tables, tuple(columns), function.get_concrete_function())


def _traced(model: keras.Model, spec: BatchSpec, training: bool | None) -> tuple[PlanScope, Any]:
    """The embedding calls of a step, and its graph as a function that can be pruned."""
    scope, method = PlanScope(), "train_step" if training else "test_step"

    def trace(*flat: tf.Tensor) -> list[tf.Tensor]:
        batch = pack_flat(spec, flat)
        with entered(scope):
            if training is None:
                model(batch[0], training=False)
            elif overrides(model, method):
                rehearse(model, batch) if training else model.test_step(batch)
            else:
                done = forward(model, batch, training)
                update_metrics(model, done, done.loss)
        return []

    with draws_kept():
        return scope, tf.compat.v1.wrap_function(trace, flat_spec(spec))


def _is_plannable(ids: tf.Tensor) -> bool:
    """Whether ids come from the batch alone, and from no row, variable or random number."""
    return not any(
        _is_stateful(operation) or (operation.type == "Identity" and PLANNED_ROWS in operation.name.rsplit("/", 1)[-1])
        for operation in ancestors(ids)
    )


def _is_stateful(operation: tf.Operation) -> bool:
    """Whether an operation may give another answer for the same input: it reads a variable, draws or has effects."""
    stateful = operation.op_def is not None and operation.op_def.is_stateful
    return stateful and not operation.type.startswith(_CONSTANT_STATE)
