"""A model's own `train_step`, written with `et.step`, as the step of a worker.

`step.apply` yields the gradient that is pushed, in the place of an update. One
version is one step of one optimizer, so a `train_step` applies once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import keras
import tensorflow as tf

from elastable.embedding_store.errors import Unsupported
from elastable.master.api import DivisorKind
from elastable.worker.loss_parts import loss_parts
from elastable.worker.loss_terms import loss_terms
from elastable.worker.reductions import RecordedLoss
from elastable.worker.scope import StepScope, StoreLayer
from elastable.worker.tape_scope import seen_by_tapes

__all__ = [
    "Applied",
    "Collector",
    "Gathering",
    "OwnStepScope",
    "collecting",
    "current_collector",
    "overrides",
    "refuse_own_updates",
    "rehearse",
]

_current = threading.local()
_CHANGES = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply")


class Collector(Protocol):
    """Takes what `step.apply` is called with, where a worker runs the step."""

    def apply(self, model: Any, tape: Any, loss: Any, of: Any, optimizer: Any) -> None:
        """See `elastable.tape_step.TapeStep.apply`."""


def current_collector() -> Collector | None:
    """The collector of this thread, if a worker runs a model's own step in it."""
    collector: Collector | None = getattr(_current, "collector", None)
    return collector


@contextmanager
def collecting(collector: Collector) -> Iterator[None]:
    """Hands every `step.apply` of this thread to the collector while the block runs."""
    before = current_collector()
    _current.collector = collector
    try:
        yield
    finally:
        _current.collector = before


def overrides(model: Any, method: str) -> bool:
    """Whether a model has a `train_step` or `test_step` of its own."""
    return getattr(type(model), method, None) is not getattr(keras.Model, method)


class _Rehearsal:
    """Counts calls, while a step is traced for its ids or to build the model."""

    calls = 0

    def apply(self, model: Any, tape: Any, loss: Any, of: Any, optimizer: Any) -> None:
        self.calls += 1


def rehearse(model: Any, batch: Any) -> None:
    """Runs a model's own `train_step` in a graph that is thrown away, or from which ids are cut.

    Raises:
        Unsupported: it does not call `step.apply` once.
    """
    rehearsal = _Rehearsal()
    with collecting(rehearsal):
        model.train_step(batch)
    if rehearsal.calls == 1:
        return
    told = "without et.step" if not rehearsal.calls else f"and calls step.apply {rehearsal.calls} times"
    raise Unsupported(
        f"model {model.name!r} overrides train_step {told}: a worker pushes the gradient of one loss to the master, "
        "whose optimizer takes one step with it. Write `with et.step(self) as step:` and `step.apply(tape, loss)`, "
        "once, with the sum of your losses; updates in turn, or by several optimizers, need a loop of your own in one "
        "process (docs/own-steps.md)"
    )


def refuse_own_updates(model: Any, graph: Any) -> None:
    """Raises `Unsupported` where a traced step changes trainable variables itself: the master would not hear of it."""
    handles = {id(weight.value.handle): weight.path for weight in model.trainable_weights}
    inside = {inner.ref(): handles[id(outer)] for outer, inner in graph.captures if id(outer) in handles}
    for operation in graph.get_operations():
        changed = inside.get(operation.inputs[0].ref()) if operation.inputs else None
        if changed is not None and operation.type.startswith(_CHANGES):
            raise Unsupported(
                f"model {model.name!r}: its train_step changes {changed!r} itself, which no other worker and not the "
                "master would hear of; leave all updates to step.apply"
            )


@dataclass(slots=True)
class OwnStepScope(StepScope):
    """A step's rows, as tapes see them that the model opens.

    Attributes:
        seen: (layer, number of the call among those in the graph or None, rows) of every call, in order.
    """

    seen: list[tuple[Any, int | None, Any]] = field(default_factory=list)

    def watched(self, layer: StoreLayer, rows: Any, in_graph: int | None) -> Any:
        """The rows of one call."""
        rows = seen_by_tapes(rows)
        self.seen.append((layer, in_graph, rows))
        return rows


@dataclass(frozen=True, slots=True)
class Applied:
    """What a step's `apply` yields.

    Attributes:
        kind, amount: What the loss is divided by; see `elastable.worker.loss_parts.LossPart`.
        loss: The loss.
        dense: id of a variable -> its gradient.
        rows: A gradient, or None, for each of `OwnStepScope.seen`.
    """

    kind: DivisorKind | None
    amount: Any
    loss: Any
    dense: dict[int, Any]
    rows: list[Any]


@dataclass(slots=True)
class Gathering:
    """Collects the gradient of a step.

    Attributes:
        model: The job's model.
        scope: Of the step.
        average: As of `TrainStep`.
        recorded: The reductions of Keras' losses so far.
        batch, rows: Tensors with data of the batch, and with rows.
        applied: What came of it.
    """

    model: Any
    scope: OwnStepScope
    average: str | None
    recorded: Sequence[RecordedLoss]
    batch: Sequence[Any]
    rows: Sequence[Any]
    applied: Applied | None = None

    def apply(self, model: Any, tape: Any, loss: Any, of: Any, optimizer: Any) -> None:
        """The gradient of the loss for all that is trained.

        Raises:
            Unsupported: another optimizer or other layers than the model's, or
                a loss whose micro-batches cannot be combined.
        """
        if optimizer is not None and optimizer is not self.model.optimizer:
            raise Unsupported(
                f"model {self.model.name!r}: in a worker step.apply takes the optimizer of compile(), not "
                f"{optimizer.name!r}; give tables their own with et.Embedding(optimizer=), or loop in one process"
            )
        as_written = (
            tf.autograph.experimental.do_not_convert
        )  # a train_step is converted by AutoGraph, with what it calls
        as_written(self._refuse_parts)(model if of is None else of)
        kind, amount = as_written(self._divisor)(loss)
        variables = list(self.model.trainable_weights)
        sources = ([variable.value for variable in variables], [rows for _, _, rows in self.scope.seen])
        dense, rows = tape.gradient(loss, sources)
        found = {id(variable): gradient for variable, gradient in zip(variables, dense, strict=True)}
        self.applied = Applied(kind, amount, loss, found, rows)

    def _refuse_parts(self, of: Any) -> None:
        roots = of if isinstance(of, list | tuple) else [of]
        inside = {id(layer) for root in roots for layer in root._flatten_layers()}
        weights = {id(weight) for root in roots for weight in root.trainable_weights}
        left = [weight.path for weight in self.model.trainable_weights if id(weight) not in weights]
        left += [layer.name for layer, _, _ in self.scope.seen if id(layer) not in inside and layer.trainable]
        if left:
            raise Unsupported(
                f"model {self.model.name!r}: step.apply(of=) leaves {', '.join(left)} out, and in a worker it is the "
                "whole model that takes a step; set trainable=False on what is not to be trained"
            )

    def _divisor(self, loss: Any) -> tuple[DivisorKind | None, Any]:
        if self.average is None:
            return None, None
        if tf.executing_eagerly():
            raise Unsupported(
                f"model {self.model.name!r}: compile(run_eagerly=True), a train_step of its own and grads_to_wait "
                "above 1; leave run_eagerly out"
            )
        parts = loss_parts(self.model, loss, loss_terms(loss, self.recorded, self.batch, self.rows), self.average)
        if len(parts) > 1:
            raise Unsupported(
                f"model {self.model.name!r}: the loss given to step.apply has terms that are divided by different "
                f"numbers ({', '.join(str(part.kind) for part in parts)}), and grads_to_wait is above 1; override "
                "compute_loss instead of train_step, or use average='records' (--average records)"
            )
        return parts[0].kind, parts[0].amount
