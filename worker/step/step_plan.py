"""The plan of a user's `train_step`: which gradients it applies, and to what; and what a step by it gathers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NoReturn, TypeAlias

import keras

from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.errors import ModelError, Unsupported
from elastable.master.backend.contract import backend
from elastable.master.backend.lazy import tf
from elastable.worker.keras.seeds import layers_of
from elastable.worker.keras.structures import BatchSpec, Gradient, TensorBatch
from elastable.worker.losses.loss_parts import LossPart, loss_parts
from elastable.worker.losses.loss_terms import LossTerms
from elastable.worker.losses.origins import Origins, ancestors
from elastable.worker.losses.recording import Recording
from elastable.worker.rows.scope import RowScope, StepScope, entered, seen_by_tapes
from elastable.worker.rows.store_layer import StoreLayer
from elastable.worker.step.forward import flat_spec, pack_flat
from elastable.worker.step.trainable import Weights, is_trained

Trained: TypeAlias = keras.Layer | Sequence[keras.Layer] | None
"""What a `step.apply` trains (`of=`): a layer or several; None: the whole model."""

Collector: TypeAlias = "Callable[[tf.GradientTape, tf.Tensor, Trained, keras.optimizers.Optimizer | None], None]"
"""Receives the arguments of `step.apply` when a worker runs the step; see `elastable.in_process.tape_step.TapeStep`."""

Read: TypeAlias = tuple[Hashable, int]
"""The variable or table that was read, and the position of the read."""

_OWN_LOOP = (
    "or train in a loop of your own (`with et.step(model) as step:`), where every step.apply changes the weights at "
    "once: docs/fit.md#your-own-training-steps"
)
_current = threading.local()
_CHANGES = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply")
#: Operations that take a variable without reading its value.
_NO_READ = ("VariableShape", "VarIsInitializedOp", "Assign", "DestroyResourceOp")


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
    """Whether a model, by its class or by itself, overrides a method of `keras.Model`, such as `train_step`."""
    return method in vars(model) or getattr(type(model), method, None) is not getattr(keras.Model, method)


def rehearse(model: keras.Model, batch: TensorBatch) -> None:
    """Traces a user's `train_step`, to build the model or to extract its ids.

    Raises:
        Unsupported: the step is not written with `et.step`.
    """
    calls: list[tf.Tensor] = []
    with collecting(lambda tape, loss, of, optimizer: calls.append(loss)):
        model.train_step(batch)
    if not calls:
        raise Unsupported(
            f"model {model.name!r} overrides train_step without et.step: in a job the master changes the weights. "
            "Write `with et.step(self) as step:` and `step.apply(tape, loss)` in the place of the optimizer's apply, "
            "once for each loss (docs/fit.md#your-own-training-steps)"
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


@contextmanager
def _metric_updates(model: keras.Model, note: Callable[[tuple[str, object]], None]) -> Iterator[None]:
    """Within the block, `note((name, arguments))` is called before each update of a metric."""
    inside: list[keras.metrics.Metric] = []

    def noting(metric: keras.metrics.Metric) -> Callable[..., object]:
        update = metric.update_state

        def update_state(*args: object, **kwargs: object) -> object:
            # A compound metric updates its parts within its own update.
            if inside:
                return update(*args, **kwargs)
            note((metric.name, (args, kwargs)))
            inside.append(metric)
            try:
                return update(*args, **kwargs)
            finally:
                inside.pop()

        converted: Callable[..., object] = tf.autograph.experimental.do_not_convert(update_state)
        return converted

    metrics = list({id(metric): metric for metric in model.metrics}.values())
    for metric in metrics:
        metric.__dict__["update_state"] = noting(metric)  # past Keras' tracking
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


def refuse_inner_call(layer: StoreLayer, ids: tf.Tensor, graph: tf.Graph | None) -> None:
    """Refuses a call of a layer anywhere but in the graph of the step, and once for all records.

    `tf.vectorized_map` calls its function in that graph, too, and gives it a number with a default.

    Raises:
        Unsupported: it is called inside an inner graph, or by `vectorized_map`.
    """
    if ids.graph is not graph or any(operation.type == "PlaceholderWithDefault" for operation in ancestors(ids)):
        raise Unsupported(
            f"embedding layer {layer.name!r} is called inside of a loop, a condition, a vectorized_map or a compiled "
            "function; call it outside and pass its output in"
        )


@dataclass(slots=True)
class _StepTrace(RowScope):
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

    def rows(self, layer: StoreLayer, ids: tf.Tensor) -> tf.Tensor:
        """Zeros of the shape of the rows."""
        graph = tf.compat.v1.get_default_graph()
        self._graph = self._graph or graph
        refuse_inner_call(layer, ids, self._graph if graph is self._graph else None)
        place = here()
        rows = seen_by_tapes(tf.zeros([tf.shape(ids)[0], layer.output_dim]))
        self.lookups[rows.op.name] = (layer.table_name, place)
        self._seen.append((layer, rows))
        return rows

    def apply(
        self, tape: tf.GradientTape, loss: tf.Tensor, of: Trained, optimizer: keras.optimizers.Optimizer | None
    ) -> None:
        """Records the gradients of one `step.apply`.

        Raises:
            ModelError: no optimizer, or a loss that does not depend on anything trained.
            Unsupported: a weight that is no part of the model.
        """
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


@dataclass(frozen=True, slots=True)
class Change:
    """A change of variables or tables.

    Attributes:
        position: After which operation.
    """

    keys: frozenset[Hashable]
    position: int


def here() -> int:
    """The position of the next operation to be created."""
    return len(tf.compat.v1.get_default_graph().get_operations())


class _StepGraph:
    """The graph of a step.

    Args:
        variables: Keras variables whose reads matter.
        rows: Name of an operation that yields rows -> what it reads, and the position of the lookup.
    """

    def __init__(
        self, graph: tf.Graph, variables: Iterable[keras.Variable], rows: Mapping[str, tuple[Hashable, int]]
    ) -> None:
        self._operations = graph.get_operations()
        self._places = {operation.name: place for place, operation in enumerate(self._operations)}
        known = {id(variable.value.handle): id(variable) for variable in variables}
        self._handles = {inner.name: known[id(outer)] for outer, inner in graph.captures if id(outer) in known}
        self._rows = rows

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


def _stale_reads(reads: Iterable[Read], applied: Sequence[Change]) -> list[Hashable]:
    """What was read after one of these changes to it, in the order of the reads."""
    stale = [
        key
        for key, position in sorted(reads, key=lambda read: read[1])
        if any(key in change.keys and change.position <= position for change in applied)
    ]
    return list(dict.fromkeys(stale))


# The plan


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of a step, in execution order.

    Attributes:
        states: Weights that no update changes, in model order.
        variables: All others, in model order.
        several: Whether the step does more than one update of the whole model by the optimizer of `compile()`.
    """

    applies: tuple[PlannedApply, ...]
    states: tuple[keras.Variable, ...]
    variables: tuple[keras.Variable, ...]
    several: bool

    def weights(self) -> Weights | None:
        """Those that its updates change, and all others; None: as the optimizer of `compile()` says."""
        return (self.variables, self.states) if self.several else None

    def optimizers(self) -> dict[str, keras.optimizers.Optimizer]:
        """Table name -> the Keras optimizer of the updates that change it."""
        return {table: apply.optimizer for apply in self.applies for table in apply.tables}


def plan_step(model: keras.Model, spec: BatchSpec) -> StepPlan | None:
    """Traces a user's `train_step` on batches of `spec`; None: the model does not override it.

    Args:
        model: A built model.
        spec: TypeSpecs of a batch (x,), (x, y) or (x, y, sample_weight).

    Raises:
        ModelError: a loss that does not depend on anything trained.
        Unsupported: a step that cannot be computed from the weights of one version; names what it reads or changes.
    """
    if not overrides(model, "train_step") or not backend().has_graphs:
        return None
    seen_by_tapes(tf.zeros([1, 1]))  # makes its variable, outside of any graph
    trace = _StepTrace(model)

    def traced(*flat: tf.Tensor) -> list[tf.Tensor]:
        with entered(trace), collecting(trace.apply), _metric_updates(model, trace.metrics.append):
            model.train_step(pack_flat(spec, flat))
        return []

    graph = tf.compat.v1.wrap_function(traced, flat_spec(spec)).graph
    if (changed := changed_weight(model, graph)) is not None:
        raise Unsupported(
            f"model {model.name!r}: its train_step changes {changed!r} itself, which the master and the other workers "
            "would not know; leave all updates to step.apply"
        )
    return _Planner(model, graph, trace).plan()


class _Planner:
    """Finds what a step reads and changes.

    All gradients of a step are computed from the weights of one version, and together they make the next one. What is
    computed from weights that an earlier `apply` of the step has changed is refused by name.
    """

    def __init__(self, model: keras.Model, graph: tf.Graph, trace: _StepTrace) -> None:
        self._model, self._trace = model, trace
        self._applies = [apply for apply, _, _ in trace.applies]
        changed = {id(variable) for apply in self._applies for variable in apply.variables}
        weights = variables_of(model.weights)
        self._variables = tuple(weight for weight in weights if id(weight) in changed)
        self._states = tuple(weight for weight in weights if id(weight) not in changed)
        metrics = model.metrics_variables
        self._names: dict[Hashable, str] = {id(each): each.path for each in (*weights, *metrics)}
        self._counters = {id(each) for each in metrics}
        self._graph = _StepGraph(graph, [*weights, *metrics], trace.lookups)

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
            if stale := _stale_reads(self._graph.reads(value), applied):
                self._refuse_second_version(f"what is assigned to {state.path!r} is computed from", stale[0])
        for name, given in self._trace.metrics:
            self._refuse_late_metric(name, _stale_reads(self._graph.reads(given), applied))
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
        if stale := _stale_reads(reads, applied):
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
        planned: The planned `step.apply` calls.
        average: As of `TrainStep`.
        recorded: What was recorded of the step so far.
        rows: Tensors that hold rows.
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
        self, tape: tf.GradientTape, loss: tf.Tensor, of: Trained, optimizer: keras.optimizers.Optimizer | None
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
        # AutoGraph converts a train_step that is itself a tf.function, and everything it calls.
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
        terms = LossTerms(self.recorded.losses, origins).of(loss)
        parts = loss_parts(self.model, loss, terms, self.average, self.recorded.updates)
        if len(parts) > 1:
            raise Unsupported(
                f"model {self.model.name!r}: the loss given to step.apply has terms that are divided by different "
                f"numbers ({', '.join(str(part.kind) for part in parts)}), and grads_to_wait is above 1; override "
                "compute_loss instead of train_step, or use average='records' (--average records)"
            )
        return replace(parts[0], loss=loss)
