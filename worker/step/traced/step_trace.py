"""Traces a user's `train_step`: its lookups, its `step.apply` calls, its metric updates."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
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
from elastable.worker.step.traced.step_graph import here
from elastable.worker.step.traced.tape_scope import seen_by_tapes
from elastable.worker.step.trainable import is_trained

__all__ = ["PlannedApply", "StepTrace", "Trained", "metric_updates"]

Trained: TypeAlias = keras.Layer | Sequence[keras.Layer] | None
"""What a `step.apply` trains (`of=`): a layer or several; None: the whole model."""


@contextmanager
def metric_updates(model: keras.Model, count: Callable[[keras.metrics.Metric, object], bool]) -> Iterator[None]:
    """Within the block, each metric update is made only if `count(metric, arguments)` returns True."""
    inside: list[keras.metrics.Metric] = []

    def asking(metric: keras.metrics.Metric) -> Callable[..., object]:
        update = metric.update_state

        def update_state(*args: object, **kwargs: object) -> object:
            # A compound metric updates its parts within its own update.
            if inside:
                return update(*args, **kwargs)
            if not count(metric, (args, kwargs)):
                return None
            inside.append(metric)
            try:
                return update(*args, **kwargs)
            finally:
                inside.pop()

        converted: Callable[..., object] = tf.autograph.experimental.do_not_convert(update_state)
        return converted

    metrics = list({id(metric): metric for metric in model.metrics}.values())
    for metric in metrics:
        metric.__dict__["update_state"] = asking(metric)  # past Keras' tracking
    try:
        yield
    finally:
        for metric in metrics:
            del metric.__dict__["update_state"]


@dataclass(frozen=True, slots=True)
class PlannedApply:
    """One `step.apply` of a step.

    Attributes:
        turn: The turn that computes it and makes its update; 0 until the step is planned.
        optimizer: The Keras optimizer of the update.
        roots: The layers passed as `of=`, or the model.
        layers: The roots with all layers they contain.
        weights: The trainable weights of the layers: what the optimizer is built for.
        variables: The weights that the loss reaches: what the update changes.
        tables: Names of the tables that the loss reaches.
    """

    turn: int
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

    def count(self, metric: keras.metrics.Metric, arguments: object) -> bool:
        """Records the update, and lets it happen."""
        self.metrics.append((metric.name, arguments))
        return True

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
        apply = PlannedApply(0, chosen, roots, layers, weights, reached, tuple(tables))
        self.applies.append((apply, gradients, here()))

    def _refuse_strangers(self, weights: Sequence[keras.Variable]) -> None:
        known = {id(weight) for weight in self.model.weights}
        strangers = [weight.path for weight in weights if id(weight) not in known]
        if strangers:
            raise Unsupported(
                f"model {self.model.name!r}: step.apply trains {strangers[0]!r}, which is no part of the model; keep "
                "the layer as an attribute of the model, so that workers and checkpoints have it"
            )
