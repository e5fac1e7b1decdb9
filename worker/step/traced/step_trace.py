"""Traces a user's `train_step`: its lookups, its `step.apply` calls, its metric updates."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import keras
import tensorflow as tf

from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.errors import ModelError, Unsupported
from elastable.worker.keras.seeds import layers_of
from elastable.worker.keras.structures import Gradient
from elastable.worker.rows.scope import refuse_inner_call
from elastable.worker.rows.store_layer import StoreLayer
from elastable.worker.step.traced.tape_scope import seen_by_tapes
from elastable.worker.step.trainable import is_trained

__all__ = ["Change", "PlannedApply", "Read", "StepGraph", "StepTrace", "Trained", "metric_updates", "stale_reads"]

Trained: TypeAlias = keras.Layer | Sequence[keras.Layer] | None
"""What a `step.apply` trains (`of=`): a layer or several; None: the whole model."""


@contextmanager
def metric_updates(model: keras.Model, note: Callable[[keras.metrics.Metric, object], None]) -> Iterator[None]:
    """Within the block, `note(metric, arguments)` is told of each metric update before it is made."""
    inside: list[keras.metrics.Metric] = []

    def telling(metric: keras.metrics.Metric) -> Callable[..., object]:
        update = metric.update_state

        def update_state(*args: object, **kwargs: object) -> object:
            # A compound metric updates its parts within its own update.
            if inside:
                return update(*args, **kwargs)
            note(metric, (args, kwargs))
            inside.append(metric)
            try:
                return update(*args, **kwargs)
            finally:
                inside.pop()

        converted: Callable[..., object] = tf.autograph.experimental.do_not_convert(update_state)
        return converted

    metrics = list({id(metric): metric for metric in model.metrics}.values())
    for metric in metrics:
        metric.__dict__["update_state"] = telling(metric)  # past Keras' tracking
    try:
        yield
    finally:
        for metric in metrics:
            del metric.__dict__["update_state"]


@dataclass(frozen=True, slots=True)
class PlannedApply:
    """One `step.apply` of a step.

    Attributes:
        optimizer: The Keras optimizer of the update.
        roots: The layers passed as `of=`, or the model.
        layers: The roots with all layers they contain.
        weights: The trainable weights of the layers: what the optimizer is built for.
        variables: The weights that the loss reaches: what the update changes.
        tables: Names of the tables that the loss reaches.
    """

    optimizer: keras.optimizers.Optimizer
    roots: tuple[keras.Layer, ...]
    layers: tuple[keras.Layer, ...]
    weights: tuple[keras.Variable, ...]
    variables: tuple[keras.Variable, ...]
    tables: tuple[str, ...]


@dataclass(slots=True)
class StepTrace:
    """Records a step: a scope for its lookups and a collector for its `step.apply` calls.

    Attributes:
        model: A built model.
        applies: (the apply, its gradients, its position in the graph) for every `step.apply`.
        metrics: (name, arguments) of every metric update.
        lookups: Name of the operation that returns the rows of a call -> (table, position of the lookup).
    """

    model: keras.Model
    applies: list[tuple[PlannedApply, Sequence[Gradient], int]] = field(default_factory=list)
    metrics: list[tuple[str, object]] = field(default_factory=list)
    lookups: dict[str, tuple[Hashable, int]] = field(default_factory=dict)
    _seen: list[tuple[StoreLayer, tf.Tensor]] = field(default_factory=list)
    _graph: tf.Graph | None = None

    def leaves_out(self, layer: StoreLayer) -> bool:
        """No layer."""
        return False

    def rows(self, layer: StoreLayer, ids: tf.Tensor) -> tf.Tensor:
        """Zeros of the shape of the rows."""
        graph = tf.compat.v1.get_default_graph()
        self._graph = self._graph or graph
        if graph is not self._graph or ids.graph is not graph:
            refuse_inner_call(layer)
        place = here()
        rows = seen_by_tapes(tf.zeros([tf.shape(ids)[0], layer.output_dim]))
        self.lookups[rows.op.name] = (layer.table_name, place)
        self._seen.append((layer, rows))
        return rows

    def note(self, metric: keras.metrics.Metric, arguments: object) -> None:
        """Records the update."""
        self.metrics.append((metric.name, arguments))

    def apply(
        self,
        model: keras.Model,
        tape: tf.GradientTape,
        loss: tf.Tensor,
        of: Trained,
        optimizer: keras.optimizers.Optimizer | None,
    ) -> None:
        """See `elastable.in_process.tape_step.TapeStep.apply`."""
        roots = (self.model,) if of is None else tuple(of) if isinstance(of, list | tuple) else (of,)
        layers = tuple(dict.fromkeys(layer for root in roots for layer in layers_of(root)))
        found = (weight for root in roots for weight in variables_of(root.trainable_weights))
        weights = tuple({id(weight): weight for weight in found}.values())
        self._refuse_strangers(weights)
        chosen = optimizer if optimizer is not None else self.model.optimizer
        if chosen is None:
            raise ModelError(
                f"model {self.model.name!r} has no optimizer: call model.compile(optimizer=...), or "
                "step.apply(tape, loss, optimizer=...)"
            )
        inside = {id(layer) for layer in layers}
        seen = [each for each in self._seen if id(each[0]) in inside and is_trained(self.model, each[0])]
        dense, rows = tape.gradient(loss, ([weight.value for weight in weights], [rows for _, rows in seen]))
        reached = tuple(weight for weight, found in zip(weights, dense, strict=True) if found is not None)
        tables = dict.fromkeys(
            layer.table_name for (layer, _), found in zip(seen, rows, strict=True) if found is not None
        )
        if not reached and not tables:
            names = ", ".join(repr(root.name) for root in roots)
            raise ModelError(
                f"model {self.model.name!r}: the loss of step.apply number {len(self.applies) + 1} depends on no "
                f"variable and on no table of {names}; compute it within `with tf.GradientTape() as tape:` inside of "
                "`with et.step(self)`"
            )
        gradients = [found for found in (*dense, *rows) if found is not None]
        apply = PlannedApply(chosen, roots, layers, weights, reached, tuple(tables))
        self.applies.append((apply, gradients, here()))

    def _refuse_strangers(self, weights: Sequence[keras.Variable]) -> None:
        known = {id(weight) for weight in self.model.weights}
        strangers = [weight.path for weight in weights if id(weight) not in known]
        if strangers:
            raise Unsupported(
                f"model {self.model.name!r}: step.apply trains {strangers[0]!r}, which is no part of the model; keep "
                "the layer as an attribute of the model, so that workers and checkpoints have it"
            )


# Dependencies in a traced step: which values are computed from which reads of variables and rows, and when


Read: TypeAlias = tuple[Hashable, int]
"""The variable or table that was read, and the position of the read."""

#: Operations that take a variable without reading its value.
_NO_READ = ("VariableShape", "VarIsInitializedOp", "Assign", "DestroyResourceOp")


@dataclass(frozen=True, slots=True)
class Change:
    """A change of variables or tables.

    Attributes:
        keys: What is changed.
        position: After which operation.
    """

    keys: frozenset[Hashable]
    position: int


def here() -> int:
    """The position of the next operation to be created."""
    return len(tf.compat.v1.get_default_graph().get_operations())


class StepGraph:
    """The graph of a step.

    Args:
        graph: A traced graph.
        variables: Keras variables whose reads matter.
        rows: Name of an operation that yields rows -> what it reads, and the position of the lookup.
    """

    def __init__(
        self,
        graph: tf.Graph,
        variables: Iterable[keras.Variable],
        rows: Mapping[str, tuple[Hashable, int]] | None = None,
    ) -> None:
        self._operations = graph.get_operations()
        self._places = {operation.name: place for place, operation in enumerate(self._operations)}
        known = {id(variable.value.handle): id(variable) for variable in variables}
        self._handles = {inner.name: known[id(outer)] for outer, inner in graph.captures if id(outer) in known}
        self._rows = rows or {}

    def reads(self, tensors: object) -> set[Read]:
        """What the tensors in a structure are computed from; other values are skipped."""
        flat = tf.nest.flatten(tensors, expand_composites=True)
        waiting = [each.op for each in flat if tf.is_tensor(each) and hasattr(each, "op")]
        seen: set[str] = set()
        places: set[Read] = set()
        while waiting:
            operation = waiting.pop()
            if operation.name in seen:
                continue
            seen.add(operation.name)
            if operation.name in self._rows:
                places.add(self._rows[operation.name])
                continue
            touched = [self._handles[each.name] for each in operation.inputs if each.name in self._handles]
            if touched and not operation.type.startswith(_NO_READ):
                places |= {(key, self._places[operation.name]) for key in touched}
            waiting.extend(each.op for each in operation.inputs if each.name not in self._handles)
        return places

    def assigned(self, variables: Iterable[keras.Variable]) -> list[tuple[keras.Variable, tf.Tensor]]:
        """(variable, new value or increment) of every assignment to one of these, in order."""
        wanted = {id(variable): variable for variable in variables}
        return [
            (wanted[key], operation.inputs[1])
            for operation in self._operations
            if operation.type.startswith("Assign")
            for each in operation.inputs
            if (key := self._handles.get(each.name)) is not None and key in wanted
        ]


def stale_reads(reads: Iterable[Read], applied: Sequence[Change]) -> list[Hashable]:
    """What was read after one of these changes to it, in the order of the reads."""
    stale = [
        key
        for key, position in sorted(reads, key=lambda read: read[1])
        if any(key in change.keys and change.position <= position for change in applied)
    ]
    return list(dict.fromkeys(stale))
