"""Runs a user's `train_step`, written with `et.step`, as a worker's step.

`step.apply` computes a gradient to push instead of making an update, as the step's plan
(`elastable.worker.step.traced.step_plan`) says.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NoReturn, Protocol

import keras
import tensorflow as tf

from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.errors import ModelError, Unsupported
from elastable.worker.keras.structures import Gradient, TensorBatch
from elastable.worker.losses.loss_parts import LossPart, loss_parts
from elastable.worker.losses.loss_terms import LossTerms
from elastable.worker.losses.origins import Origins
from elastable.worker.losses.recording import Recording
from elastable.worker.rows.scope import StepScope
from elastable.worker.rows.store_layer import StoreLayer
from elastable.worker.step.traced.step_trace import PlannedApply, Trained
from elastable.worker.step.traced.tape_scope import seen_by_tapes

__all__ = [
    "Applied",
    "Collector",
    "Gathering",
    "OwnStepScope",
    "changed_weight",
    "collecting",
    "current_collector",
    "overrides",
    "refuse_own_updates",
    "rehearse",
]

_current = threading.local()
_CHANGES = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply")


class Collector(Protocol):
    """Receives the arguments of `step.apply` when a worker runs the step."""

    def apply(
        self,
        model: keras.Model,
        tape: tf.GradientTape,
        loss: tf.Tensor,
        of: Trained,
        optimizer: keras.optimizers.Optimizer | None,
    ) -> None:
        """See `elastable.in_process.tape_step.TapeStep.apply`."""


def current_collector() -> Collector | None:
    """The collector of this thread, if a worker is running a user's step in it."""
    collector: Collector | None = getattr(_current, "collector", None)
    return collector


@contextmanager
def collecting(collector: Collector) -> Iterator[None]:
    """Passes every `step.apply` of this thread to the collector within the block."""
    before = current_collector()
    _current.collector = collector
    try:
        yield
    finally:
        _current.collector = before


def overrides(model: keras.Model, method: str) -> bool:
    """Whether a model overrides `train_step` or `test_step`."""
    return getattr(type(model), method, None) is not getattr(keras.Model, method)


class _Rehearsal:
    """Counts the calls of `step.apply`, and applies nothing."""

    calls = 0

    def apply(
        self,
        model: keras.Model,
        tape: tf.GradientTape,
        loss: tf.Tensor,
        of: Trained,
        optimizer: keras.optimizers.Optimizer | None,
    ) -> None:
        self.calls += 1


def rehearse(model: keras.Model, batch: TensorBatch) -> None:
    """Traces a user's `train_step`, to build the model or to extract its ids.

    Raises:
        Unsupported: the step is not written with `et.step`.
    """
    rehearsal = _Rehearsal()
    with collecting(rehearsal):
        model.train_step(batch)
    if not rehearsal.calls:
        raise Unsupported(
            f"model {model.name!r} overrides train_step without et.step: in a job the master changes the weights. "
            "Write `with et.step(self) as step:` and `step.apply(tape, loss)` in the place of the optimizer's apply, "
            "once for each loss (docs/own-steps.md)"
        )


def refuse_own_updates(model: keras.Model, graph: tf.Graph) -> None:
    """Raises `Unsupported` if a traced step assigns trainable variables itself: the master would not know."""
    changed = changed_weight(model, graph)
    if changed is not None:
        raise Unsupported(
            f"model {model.name!r}: its train_step changes {changed!r} itself, which the master and the other workers "
            "would not know; leave all updates to step.apply"
        )


def changed_weight(model: keras.Model, graph: tf.Graph) -> str | None:
    """The path of a trainable weight that a traced function assigns; None: it assigns none."""
    handles: dict[int, str] = {id(weight.value.handle): weight.path for weight in variables_of(model.trainable_weights)}
    inside = {inner.ref(): handles[id(outer)] for outer, inner in graph.captures if id(outer) in handles}
    for operation in graph.get_operations():
        changed: str | None = inside.get(operation.inputs[0].ref()) if operation.inputs else None
        if changed is not None and operation.type.startswith(_CHANGES):
            return changed
    return None


@dataclass(slots=True)
class OwnStepScope(StepScope):
    """A step's rows, recorded by the tapes that the user opens.

    Attributes:
        seen: (layer, number of the call among those in the graph or None, rows) of every call, in order.
    """

    seen: list[tuple[StoreLayer, int | None, tf.Tensor]] = field(default_factory=list)

    def watched(self, layer: StoreLayer, rows: tf.Tensor, in_graph: int | None) -> tf.Tensor:
        """The rows of one call."""
        rows = seen_by_tapes(rows)
        self.seen.append((layer, in_graph, rows))
        return rows


@dataclass(frozen=True, slots=True)
class Applied:
    """The result of one `step.apply`.

    Attributes:
        part: The loss, and what it is divided by.
        dense: id of a variable -> its gradient.
        rows: Number of a call in `OwnStepScope.seen` -> the gradient of its rows, or None.
    """

    part: LossPart
    dense: dict[int, Gradient]
    rows: dict[int, Gradient]


@dataclass(slots=True)
class Gathering:
    """Collects the gradients of a step.

    Attributes:
        model: The job's model.
        planned: The planned `step.apply` calls.
        scope: Of the step.
        average: As of `TrainStep`.
        recorded: What was recorded of the step so far.
        batch: The batch.
        rows: Tensors that hold rows.
        applied: The results so far.
    """

    model: keras.Model
    planned: Sequence[PlannedApply]
    scope: OwnStepScope
    average: str | None
    recorded: Recording
    batch: TensorBatch
    rows: Sequence[tf.Tensor]
    applied: list[Applied] = field(default_factory=list)
    _calls: int = 0

    def apply(
        self,
        model: keras.Model,
        tape: tf.GradientTape,
        loss: tf.Tensor,
        of: Trained,
        optimizer: keras.optimizers.Optimizer | None,
    ) -> None:
        """Computes the gradient of the loss.

        Raises:
            ModelError: the step calls `apply` more often than planned.
            Unsupported: a loss that cannot be combined over micro-batches.
        """
        number, self._calls = self._calls, self._calls + 1
        if number >= len(self.planned):
            self._refuse_other_calls()
        planned = self.planned[number]
        # AutoGraph converts a train_step that is a tf.function of its own, and everything it calls.
        part = tf.autograph.experimental.do_not_convert(self._divisor)(loss)
        trained = {id(variable) for variable in self.model.trainable_weights}
        variables = [variable for variable in planned.variables if id(variable) in trained]
        layers = {id(layer) for layer in planned.layers}
        calls = [
            call
            for call, (layer, _, _) in enumerate(self.scope.seen)
            if layer.table_name in planned.tables and id(layer) in layers
        ]
        sources = ([variable.value for variable in variables], [self.scope.seen[call][2] for call in calls])
        dense, rows = tape.gradient(loss, sources)
        found = {id(variable): gradient for variable, gradient in zip(variables, dense, strict=True)}
        self.applied.append(Applied(part, found, dict(zip(calls, rows, strict=True))))

    def end(self) -> None:
        """Ends the step. Raises `ModelError` if it called `apply` less often than planned."""
        if self._calls != len(self.planned):
            self._refuse_other_calls()

    def _refuse_other_calls(self) -> NoReturn:
        raise ModelError(
            f"model {self.model.name!r}: its train_step called step.apply {self._calls} times, and was planned with "
            f"{len(self.planned)}; it must do the same every time that it is traced"
        )

    def _divisor(self, loss: tf.Tensor) -> LossPart:
        if self.average is None:
            return LossPart(None, None, loss)
        if tf.executing_eagerly():
            raise Unsupported(
                f"model {self.model.name!r}: compile(run_eagerly=True) does not work with its own train_step and "
                "grads_to_wait above 1; leave run_eagerly out"
            )
        origins = Origins(self.batch, self.rows, self.recorded.calls)
        parts = loss_parts(self.model, loss, LossTerms(self.recorded.losses, origins).of(loss), self.average)
        if len(parts) > 1:
            raise Unsupported(
                f"model {self.model.name!r}: the loss given to step.apply has terms that are divided by different "
                f"numbers ({', '.join(str(part.kind) for part in parts)}), and grads_to_wait is above 1; override "
                "compute_loss instead of train_step, or use average='records' (--average records)"
            )
        return replace(parts[0], loss=loss)
