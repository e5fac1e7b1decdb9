"""The plan of a user's `train_step`: which gradients it applies.

A step may call `step.apply` several times, with several optimizers. All of its gradients are computed from the weights
of one version, for example those of two tapes that were both open before the first `apply`; together they make the next
version. What is computed from weights that an earlier `apply` of the step has changed is refused by name.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import keras
import tensorflow as tf

from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.errors import Unsupported
from elastable.worker.keras.structures import BatchSpec
from elastable.worker.rows.scope import entered
from elastable.worker.step.batch_checks import flat_spec, pack_flat
from elastable.worker.step.traced.own_step import collecting, overrides, refuse_own_updates
from elastable.worker.step.traced.step_trace import (
    Change,
    PlannedApply,
    Read,
    StepGraph,
    StepTrace,
    metric_updates,
    stale_reads,
)
from elastable.worker.step.traced.tape_scope import seen_by_tapes

__all__ = ["StepPlan", "plan_step", "planned_optimizers"]

_OWN_LOOP = (
    "or train in a loop of your own (`with et.step(model) as step:`), where every step.apply changes the weights at "
    "once: docs/own-steps.md"
)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of a step, in execution order.

    Attributes:
        applies: Every `step.apply`.
        states: Weights that no update changes, in model order.
        variables: All others, in model order.
        several: Whether the step does more than one update of the whole model by the optimizer of `compile()`.
    """

    applies: tuple[PlannedApply, ...]
    states: tuple[keras.Variable, ...]
    variables: tuple[keras.Variable, ...]
    several: bool

    def optimizers(self) -> dict[str, keras.optimizers.Optimizer]:
        """Table name -> the Keras optimizer of the updates that change it."""
        return {table: apply.optimizer for apply in self.applies for table in apply.tables}


def planned_optimizers(steps: StepPlan | None) -> list[keras.Optimizer]:
    """Those of a step's updates; None: Keras' own step, with the optimizer of `compile()`."""
    return [] if steps is None else [apply.optimizer for apply in steps.applies]


def plan_step(model: keras.Model, spec: BatchSpec) -> StepPlan | None:
    """Traces a user's `train_step` on batches of `spec`; None: the model does not override it.

    Args:
        model: A built model.
        spec: TypeSpecs of a batch (x,), (x, y) or (x, y, sample_weight).

    Raises:
        ModelError: a loss that does not depend on anything trained.
        Unsupported: a step that cannot be computed from the weights of one version; names what it reads or changes.
    """
    if not overrides(model, "train_step"):
        return None
    seen_by_tapes(tf.zeros([1, 1]))  # makes its variable, outside of any graph
    trace = StepTrace(model)

    def traced(*flat: tf.Tensor) -> list[tf.Tensor]:
        with entered(trace), collecting(trace), metric_updates(model, trace.note):
            model.train_step(pack_flat(spec, flat))
        return []

    graph = tf.compat.v1.wrap_function(traced, flat_spec(spec)).graph
    refuse_own_updates(model, graph)
    return _Planner(model, graph, trace).plan()


class _Planner:
    """Finds what a step reads and changes: see the module's docstring."""

    def __init__(self, model: keras.Model, graph: tf.Graph, trace: StepTrace) -> None:
        self._model, self._trace = model, trace
        self._applies = [apply for apply, _, _ in trace.applies]
        changed = {id(variable) for apply in self._applies for variable in apply.variables}
        weights = variables_of(model.weights)
        self._variables = tuple(weight for weight in weights if id(weight) in changed)
        self._states = tuple(weight for weight in weights if id(weight) not in changed)
        metrics = model.metrics_variables
        self._names: dict[Hashable, str] = {id(each): each.path for each in (*weights, *metrics)}
        self._counters = {id(each) for each in metrics}
        self._graph = StepGraph(graph, [*weights, *metrics], trace.lookups)

    def plan(self) -> StepPlan:
        """The plan; see `plan_step`."""
        several = self._is_several()
        if several:
            self._refuse_two_owners()
            self._refuse_optimizers()
        applied: list[Change] = []
        for number, (apply, gradients, position) in enumerate(self._trace.applies, 1):
            self._refuse_apply(number, apply, self._graph.reads(gradients), applied)
            applied.append(Change(_changed_by(apply), position))
        for state, value in self._graph.assigned(self._states):
            if stale := stale_reads(self._graph.reads(value), applied):
                self._refuse_second_version(f"what is assigned to {state.path!r} is computed from", stale[0])
        for name, given in self._trace.metrics:
            self._refuse_late_metric(name, stale_reads(self._graph.reads(given), applied))
        return StepPlan(tuple(self._applies), self._states, self._variables, several)

    def _refuse_apply(self, number: int, apply: PlannedApply, reads: Iterable[Read], applied: Sequence[Change]) -> None:
        """Raises unless the gradient can be computed, and its update made, at the weights that the step begins with."""
        for key, _ in reads:
            if key in self._counters:
                raise Unsupported(
                    f"model {self._model.name!r}: the loss of step.apply number {number} is computed from the metric "
                    f"variable {self._name(key)}, and workers count metrics from zero for every micro-batch; keep the "
                    "number in a weight of a layer"
                )
        if stale := stale_reads(reads, applied):
            self._refuse_second_version(f"the loss of step.apply number {number} is computed from", stale[0])
        if twice := [key for change in applied for key in _changed_by(apply) if key in change.keys]:
            raise Unsupported(
                f"model {self._model.name!r}: step.apply number {number} of its train_step changes "
                f"{self._name(twice[0])}, which an earlier one changes, too, and a step makes one version. Add the "
                f"losses up and apply once; {_OWN_LOOP}"
            )

    def _refuse_second_version(self, what: str, key: Hashable) -> NoReturn:
        raise Unsupported(
            f"model {self._model.name!r}: in its train_step {what} {self._name(key)}, which a step.apply before it "
            "changes. That needs a second version, and a step makes one. Open all tapes before the first step.apply, "
            "so that all losses are computed from the same weights (`with tf.GradientTape() as one, tf.GradientTape() "
            f"as other:`); {_OWN_LOOP}"
        )

    def _refuse_late_metric(self, name: str, stale: Sequence[Hashable]) -> None:
        if stale:
            raise Unsupported(
                f"model {self._model.name!r}: metric {name!r} is updated with values that its train_step computes from "
                f"{self._name(stale[0])} after step.apply has changed it. In a job a version's new weights exist only "
                "in the next step; update the metric with values that the loss was computed from"
            )

    def _refuse_two_owners(self) -> None:
        """Raises if a table has two optimizers, or an optimizer trains different layers in different calls."""
        owners: dict[str, keras.optimizers.Optimizer] = {}
        trained: dict[int, tuple[keras.Layer, ...]] = {}
        for apply in self._applies:
            if trained.setdefault(id(apply.optimizer), apply.roots) != apply.roots:
                raise Unsupported(
                    f"model {self._model.name!r}: the optimizer {apply.optimizer.name!r} is given for other layers "
                    "than before; an optimizer must train the same layers (of=) in every step.apply, because Keras "
                    "builds it for them"
                )
            for table in apply.tables:
                if owners.setdefault(table, apply.optimizer) is not apply.optimizer:
                    raise Unsupported(
                        f"model {self._model.name!r}: the table {table!r} is trained by two optimizers, "
                        f"{owners[table].name!r} and {apply.optimizer.name!r}; give both step.apply the same one, or "
                        "leave the layer out of one of them (of=)"
                    )

    def _refuse_optimizers(self) -> None:
        """Raises for optimizer settings that only make sense for one update of the whole model."""
        applies = self._applies
        own = [layer.optimizer for apply in applies for layer in apply.layers if hasattr(layer, "table_spec")]
        for optimizer in [*(apply.optimizer for apply in applies), *own]:
            asked = None
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                asked = "LossScaleOptimizer (which mixed_float16 adds)"
            for name in ("use_ema", "gradient_accumulation_steps", "loss_scale_factor"):
                if getattr(optimizer, name, None):
                    asked = asked or f"{type(optimizer).__name__}({name}={getattr(optimizer, name)!r})"
            if asked:
                raise Unsupported(
                    f"model {self._model.name!r}: {asked} is not supported in a train_step that applies several "
                    "times, or by another optimizer than that of compile(), or to a part of the model; leave it out"
                )

    def _is_several(self) -> bool:
        first = self._applies[0]
        whole = {id(weight) for weight in variables_of(self._model.trainable_weights)}
        one = len(self._applies) == 1 and first.optimizer is self._model.optimizer
        return not (one and whole == {id(weight) for weight in first.variables})

    def _name(self, key: Hashable) -> str:
        return f"the table {key!r}" if isinstance(key, str) else repr(self._names[key])


def _changed_by(apply: PlannedApply) -> frozenset[Hashable]:
    return frozenset([*map(id, apply.variables), *apply.tables])
