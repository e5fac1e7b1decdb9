"""The plan of a user's `train_step`: which gradients it applies, and on which version each is computed.

A step may call `step.apply` several times, with several optimizers. Gradients of the same weights make one version, for
example those of two tapes that were both open before the first `apply`. A gradient of weights that an earlier `apply`
has changed needs a later version: the step takes several *turns*, and all its micro-batches are computed again in each
turn, with the weights that the previous turn produced.

So the numbers are those of a loop that applies one gradient after the other to one batch of all records. A value that
cannot be computed from the weights of a single version is refused by name.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import keras
import tensorflow as tf

from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.errors import Unsupported
from elastable.worker.keras.seeds import seed_states
from elastable.worker.keras.structures import BatchSpec
from elastable.worker.rows.scope import entered
from elastable.worker.step.tensor_specs import flat_spec, pack_flat
from elastable.worker.step.traced.own_step import collecting, overrides, refuse_own_updates
from elastable.worker.step.traced.step_graph import Change, Reads, StepGraph, stale_reads
from elastable.worker.step.traced.step_trace import PlannedApply, StepTrace, metric_updates
from elastable.worker.step.traced.tape_scope import seen_by_tapes

__all__ = ["StepPlan", "plan_step", "planned_optimizers"]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of a step, in execution order.

    Attributes:
        applies: Every `step.apply`.
        metrics: For every metric update, the turn that counts it.
        assigned: For every assignment of a state, the turn that makes it.
        states: Weights that no update changes, in model order.
        variables: All others, in model order.
        several: Whether the step does more than one update of the whole model by the optimizer of `compile()`.
    """

    applies: tuple[PlannedApply, ...]
    metrics: tuple[int, ...]
    assigned: tuple[int, ...]
    states: tuple[keras.Variable, ...]
    variables: tuple[keras.Variable, ...]
    several: bool

    @property
    def turns(self) -> int:
        """Number of versions that a step makes."""
        return self.applies[-1].turn + 1

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
        Unsupported: a step that cannot be computed turn by turn; names what it reads or changes.
    """
    if not overrides(model, "train_step"):
        return None
    seen_by_tapes(tf.zeros([1, 1]))  # makes its variable, outside of any graph
    trace = StepTrace(model)

    def traced(*flat: tf.Tensor) -> list[tf.Tensor]:
        with entered(trace), collecting(trace), metric_updates(model, trace.count):
            model.train_step(pack_flat(spec, flat))
        return []

    graph = tf.compat.v1.wrap_function(traced, flat_spec(spec)).graph
    refuse_own_updates(model, graph)
    return _Planner(model, graph, trace).plan()


class _Planner:
    """Finds turns: see the module's docstring."""

    def __init__(self, model: keras.Model, graph: tf.Graph, trace: StepTrace) -> None:
        self._model, self._trace = model, trace
        self._applies = [apply for apply, _, _ in trace.applies]
        changed = {id(variable) for apply in self._applies for variable in apply.variables}
        weights = variables_of(model.weights)
        self._variables = tuple(weight for weight in weights if id(weight) in changed)
        self._states = tuple(weight for weight in weights if id(weight) not in changed)
        metrics = model.metrics_variables
        draws = seed_states(model)
        self._names: dict[Hashable, str] = {id(each): each.path for each in (*weights, *metrics, *draws)}
        self._counters = {id(each) for each in metrics}
        self._graph = StepGraph(graph, [*weights, *metrics, *draws], trace.lookups)
        self._assigned: list[Change] = []

    def plan(self) -> StepPlan:
        """The plan; see `plan_step`."""
        several = self._is_several()
        if several:
            self._refuse_two_owners()
            self._refuse_optimizers()
        reads = [self._graph.reads(gradients) for _, gradients, _ in self._trace.applies]
        applied = self._turns(reads)
        begins = [0, *(before.position for before, change in pairwise(applied) if change.turn > before.turn)]
        drawn: list[set[str]] = [set() for _ in begins]
        self._assigned = self._assignments(begins, applied, drawn)
        for number, (found, change) in enumerate(zip(reads, applied, strict=True), 1):
            self._refuse_counters(found, number)
            self._refuse_stale(f"the loss of step.apply number {number}", found, change.turn, applied)
            drawn[change.turn] |= found.drawn
        metrics = [self._counted(name, given, applied, drawn) for name, given in self._trace.metrics]
        self._refuse_drawn_twice(drawn)
        return StepPlan(
            applies=tuple(replace(each, turn=change.turn) for each, change in zip(self._applies, applied, strict=True)),
            metrics=tuple(metrics),
            assigned=tuple(change.turn for change in self._assigned),
            states=self._states,
            variables=self._variables,
            several=several,
        )

    def _turns(self, reads: Sequence[Reads]) -> list[Change]:
        """Assigns every apply to a turn: the current one if it can be computed there, else a new one."""
        applied: list[Change] = []
        for number, ((apply, _, position), found) in enumerate(zip(self._trace.applies, reads, strict=True)):
            keys = frozenset([*map(id, apply.variables), *apply.tables])
            turn = applied[-1].turn if applied else 0
            together: set[Hashable] = set().union(*(change.keys for change in applied if change.turn == turn))
            stale = stale_reads(found, turn, applied)
            if stale or together & keys:
                turn += 1
                stale_now = stale_reads(found, turn, applied)
                if stale_now:
                    self._refuse_passed(number + 1, stale_now)
            applied.append(Change(keys, position, turn))
        return applied

    def _assignments(self, begins: Sequence[int], applied: Sequence[Change], drawn: list[set[str]]) -> list[Change]:
        changes, values = [], []
        every = [*self._states, *self._model.metrics_variables, *seed_states(self._model)]
        for variable, _, value in self._graph.assigned(every):
            if value is variable and len(begins) > 1:
                raise Unsupported(
                    f"model {self._model.name!r}: its train_step changes {variable.path!r} within a condition, a loop "
                    "or a compiled function, and applies gradients in turn; change it outside of them"
                )
        for state, position, value in self._graph.assigned(self._states):
            turn = max(at for at, begin in enumerate(begins) if begin <= position)
            changes.append(Change(frozenset([id(state)]), position, turn))
            values.append(value)
        self._assigned = changes
        for change, value in zip(changes, values, strict=True):
            found = self._graph.reads(value)
            name = self._name(next(iter(change.keys)))
            self._refuse_stale(f"what is assigned to {name}", found, change.turn, applied)
            drawn[change.turn] |= found.drawn
        return changes

    def _counted(self, name: str, given: object, applied: Sequence[Change], drawn: list[set[str]]) -> int:
        """The first turn that can compute a metric's arguments."""
        found = self._graph.reads(given)
        stale: list[Hashable] = []
        for turn in range(len(drawn)):
            stale = stale_reads(found, turn, applied, self._assigned)
            if not stale:
                drawn[turn] |= found.drawn
                return turn
        raise Unsupported(
            f"model {self._model.name!r}: metric {name!r} is updated with values that its train_step computes from "
            f"{self._name(stale[0])} after step.apply has changed it, or from before and after at once. In a job a "
            "version's new weights exist only in the next step; update the metric with values that the loss was "
            "computed from"
        )

    def _refuse_stale(self, what: str, reads: Reads, turn: int, applied: Sequence[Change]) -> None:
        stale = stale_reads(reads, turn, applied, self._assigned)
        if stale:
            raise Unsupported(
                f"model {self._model.name!r}: in its train_step {what} is computed from {self._name(stale[0])} at "
                "another time than the rest, and step.apply changes it in between; compute all of it before that "
                "step.apply, or all of it again between it and the next one"
            )

    def _refuse_passed(self, number: int, stale: Sequence[Hashable]) -> None:
        raise Unsupported(
            f"model {self._model.name!r}: the loss of step.apply number {number} is computed from "
            f"{self._name(stale[0])} as it was before step.apply number {number - 1}, which changes it, so no "
            "version of the job has these weights together with the new ones. Compute the loss, and everything it "
            "depends on, again in a separate tape after that step.apply; or add the losses up and apply once"
        )

    def _refuse_counters(self, reads: Reads, number: int) -> None:
        for key, _ in reads.places:
            if key in self._counters:
                raise Unsupported(
                    f"model {self._model.name!r}: the loss of step.apply number {number} is computed from the metric "
                    f"variable {self._name(key)}, and workers count metrics from zero for every micro-batch; keep the "
                    "number in a weight of a layer"
                )

    def _refuse_drawn_twice(self, drawn: Sequence[set[str]]) -> None:
        seen: set[str] = set()
        for names in drawn:
            if both := sorted(seen & names):
                raise Unsupported(
                    f"model {self._model.name!r}: {both[0]!r} is drawn once in its train_step and used on both sides "
                    "of a step.apply, where workers would draw it twice; draw with keras.random and a "
                    "keras.random.SeedGenerator that is an attribute of the model, or draw anew after the step.apply"
                )
            seen |= names

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
