"""The compiled steps: evaluation, training with the loss of `compile()`, and a model's own `train_step`."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras
import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.errors import Unsupported
from elastable.embedding_store.shards.server_contract import Slices
from elastable.embedding_store.tables.grouping import sum_by_position
from elastable.master.api import Divisor, DivisorKind, GradientPart, Tensor
from elastable.master.backend.contract import backend
from elastable.master.backend.lazy import tf
from elastable.worker.keras.seeds import seed_states, set_seeds
from elastable.worker.keras.structures import BatchSpec, Gradient, TensorBatch
from elastable.worker.losses.loss_parts import (
    LossPart,
    MetricMean,
    all_metrics,
    eager_means,
    loss_parts,
    metric_means,
    parts_with_metrics,
    require_rowwise,
)
from elastable.worker.losses.loss_terms import LossTerms
from elastable.worker.losses.origins import Origins
from elastable.worker.losses.recording import RecordedLoss, Recording, recording
from elastable.worker.rows.scope import StepScope, entered, seen_by_tapes
from elastable.worker.rows.store_layer import StoreLayer
from elastable.worker.step.forward import flat_spec, forward, pack_flat, records_in, update_metrics, warn_of_values
from elastable.worker.step.id_plan import IdPlan
from elastable.worker.step.id_set import IdSets
from elastable.worker.step.step_plan import Applied, Gathering, OwnStepScope, StepPlan, collecting, overrides
from elastable.worker.step.trainable import (
    StepResult,
    frozen_tables,
    imposed,
    is_trained,
    scale_variables,
    trained_and_others,
)

#: (table, int64 ids) -> float32 rows, for calls that could not be planned.
Lookup = Callable[[str, Int64], Float32]


class _PartTensors(NamedTuple):
    """The gradient of one part of a micro-batch's loss, as tensors.

    Attributes:
        amount: float64 scalar: what the part was divided by, with `DivisorKind.AMOUNT`.
        losses: Place of a metric's total -> the mean that the part adds to it.
        penalties: Table -> what each row of its BET adds to the loss.
        dense: Place of a variable -> its gradient.
        planned: Table -> (values `[n, dim]`, BET positions `[n]`).
        unplanned: Number of a call that could not be planned -> (values `[u, dim]`, unique ids `[u]`).
    """

    amount: tf.Tensor
    losses: dict[int, tf.Tensor]
    penalties: dict[str, tf.Tensor]
    dense: dict[int, tf.Tensor]
    planned: dict[str, tuple[tf.Tensor, tf.Tensor]]
    unplanned: dict[int, tuple[tf.Tensor, tf.Tensor]]


class ModelStep(ABC):
    """A compiled call of a model with BETs instead of tables.

    Args:
        model: A compiled and built model.
        spec: TypeSpecs of its batches.
        lookup: For calls that could not be planned.
    """

    def __init__(
        self, model: keras.Model, spec: BatchSpec, plan: IdPlan, lookup: Lookup | None, training: bool
    ) -> None:
        self._model = model
        self._plan = plan
        self._lookup = lookup
        self._training = training
        self._dims = {layer.table_name: layer.output_dim for layer in plan.layers}
        self._tables = tuple(dict.fromkeys(plan.tables))
        self._spec = spec
        self._inputs = [
            *flat_spec(spec),
            *(tf.TensorSpec([None, self._dims[table]], tf.float32) for table in self._tables),
            *(tf.TensorSpec([None], tf.int32) for _ in plan.tables),
            tf.TensorSpec([], tf.int64),
        ]
        self._function: Callable[..., Any] | None = self._untraced()

    def _untraced(self) -> Callable[..., Any] | None:
        return self._body if getattr(self._model, "run_eagerly", False) else None

    @abstractmethod
    def _body(self, *flat: tf.Tensor) -> object:
        """The step: a function of the batch, BETs, inverses and the number of the micro-batch."""

    def _call(self, batch: TensorBatch, bets: Mapping[str, tf.Tensor], ids: IdSets, micro_batch: int) -> Any:
        if self._function is None:
            # A concrete function: calls skip the search for a matching trace.
            self._function = self._traced().get_concrete_function()
        flat = tf.nest.flatten(batch, expand_composites=True)
        arrays = [*map(bets.__getitem__, self._tables), *ids.inverses, np.int64(micro_batch)]
        tensor = functools.partial(backend().tensor, ours=True)
        return self._function(*flat, *map(tensor, arrays))

    def _traced(self) -> tf.types.experimental.PolymorphicFunction:
        """The step, compiled as `Model.fit` compiles its own: without AutoGraph."""
        return tf.function(tf.autograph.experimental.do_not_convert(self._body), input_signature=self._inputs)

    def _unpack(
        self, flat: Sequence[tf.Tensor]
    ) -> tuple[TensorBatch, dict[str, tf.Tensor], list[tf.Tensor | None], tf.Tensor]:
        """(batch, BETs by table, an inverse or None for every call, micro-batch)."""
        parts = len(flat_spec(self._spec))
        tables = len(self._tables)
        batch = pack_flat(self._spec, flat[:parts])
        bets = dict(zip(self._tables, flat[parts : parts + tables], strict=True))
        planned = iter(flat[parts + tables : -1])
        inverses = [next(planned) if known else None for known in self._plan.planned]
        return batch, bets, inverses, flat[-1]

    def _forward(self, batch: TensorBatch, scope: StepScope) -> tuple[tf.Tensor, tf.Tensor | None]:
        """The loss, and the penalty on rows (None: there is none); metrics are reset and updated."""
        self._model.reset_metrics()
        with entered(scope):
            done = forward(self._model, batch, self._training)
            terms = [penalty(scope.bets[layer.table_name]) for layer, penalty in self._regularized(scope)]
            penalty = tf.add_n(terms) if terms else None
            if penalty is not None and done.loss.shape.rank != 0:
                raise Unsupported(
                    f"model {self._model.name!r}: a loss with a value for each record (reduction 'none') cannot be "
                    "combined with an embeddings_regularizer, in Keras either; use reduction='sum'"
                )
            update_metrics(self._model, done, done.loss if penalty is None else done.loss + penalty)
        return done.loss, penalty

    def _regularized(self, scope: StepScope) -> list[tuple[StoreLayer, Callable[[tf.Tensor], tf.Tensor]]]:
        """The layers with a penalty: once per layer, over the rows of its table that this batch touches.

        None where a `compute_loss` of the model's own leaves `self.losses` out.
        """
        if not scope.losses_read:
            return []
        bets = scope.bets
        return [
            (layer, layer.embeddings_regularizer)
            for layer in dict.fromkeys(self._plan.layers)
            if layer.embeddings_regularizer is not None and layer.table_name in bets and is_trained(self._model, layer)
        ]


class EvaluateStep(ModelStep):
    """Forward pass and metrics of one micro-batch, as in inference."""

    def __init__(self, model: keras.Model, spec: BatchSpec, plan: IdPlan, lookup: Lookup | None) -> None:
        super().__init__(model, spec, plan, lookup, training=False)
        self._warned = False

    def __call__(self, batch: TensorBatch, bets: Mapping[str, Float32], ids: IdSets) -> tuple[Tensor, ...]:
        """Metric state of this micro-batch only; arguments as in `TrainStep`."""
        return _arrays(self._call(batch, bets, ids, 0))

    def _body(self, *flat: tf.Tensor) -> list[tf.Tensor]:
        batch, bets, inverses, _ = self._unpack(flat)
        scope = StepScope(self._plan.layers, inverses, bets, self._lookup)
        if overrides(self._model, "test_step"):
            self._model.reset_metrics()
            with entered(scope):
                returned = self._model.test_step(batch)
            if not self._warned:  # it may run eagerly
                self._warned = True
                warn_of_values(self._model, "test_step", returned)
        else:
            self._forward(batch, scope)
        return _values(self._model.metrics_variables)


class InferStep(ModelStep):
    """What the model predicts for a batch (x,), as in inference."""

    def __init__(self, model: keras.Model, spec: BatchSpec, plan: IdPlan, lookup: Lookup | None) -> None:
        super().__init__(model, spec, plan, lookup, training=False)

    def __call__(self, batch: TensorBatch, bets: Mapping[str, Float32], ids: IdSets) -> list[Tensor]:
        """The outputs in the order of the model's; arguments as in `TrainStep`."""
        return list(_arrays(self._call(batch, bets, ids, 0)))

    def _body(self, *flat: tf.Tensor) -> list[tf.Tensor]:
        batch, bets, inverses, _ = self._unpack(flat)
        with entered(StepScope(self._plan.layers, inverses, bets, self._lookup)):
            found: list[tf.Tensor] = tf.nest.flatten(self._model(batch[0], training=False))
            return found


def _values(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(variable.value) for variable in variables]


def _arrays(tensors: Iterable[tf.Tensor]) -> tuple[Tensor, ...]:
    return tuple(map(np.asarray, tensors))


# Training


class _StepTensors(NamedTuple):
    """What the compiled step returns; `parts` has one entry for each part of the loss."""

    loss: tf.Tensor
    parts: list[_PartTensors]
    states: list[tf.Tensor]
    metrics: list[tf.Tensor]


class TrainStep(ModelStep):
    """Forward, backward and metrics of one micro-batch.

    Args:
        model, spec, lookup: As of `ModelStep`.
        seed: Seed of dropout; None: random layers continue from their current state, as in Keras.
        average: How micro-batches are combined (`JobSpec.average`); None: each is a version.
        steps: The plan of the model's own `train_step`; None: it has none.

    Raises:
        Unsupported: a table's regularizer, or in the first call a loss, that cannot be combined over micro-batches.
    """

    def __init__(
        self,
        model: keras.Model,
        spec: BatchSpec,
        plan: IdPlan,
        lookup: Lookup | None,
        seed: int | None,
        average: str | None = None,
        steps: StepPlan | None = None,
    ) -> None:
        self._seed, self._steps = seed, steps
        self._variables, self._states = trained_and_others(model, steps.weights() if steps else None)
        self._trainable = b""
        self._traces: dict[bytes, Callable[..., _StepTensors] | None] = {}
        self._average = average
        self._seed_states = seed_states(model, seed)
        self._unplanned: list[str] = []
        self._kinds: dict[bytes, list[DivisorKind | None]] = {}
        self._divisions: dict[bytes, list[str]] = {}
        self._once: dict[bytes, tuple[int, ...]] = {}
        super().__init__(model, spec, plan, lookup, training=True)
        self._refuse_unsupported()

    def hold(self, trainable: bytes) -> None:
        """Trains what these flags (`read_trainable`) select from now on; b"": the model's current flags."""
        if trainable != self._trainable:
            self._traces[self._trainable] = self._function
            self._trainable = trainable
            self._function = self._traces.get(trainable, self._untraced())

    def __call__(self, batch: TensorBatch, bets: Mapping[str, Float32], ids: IdSets, micro_batch: int) -> StepResult:
        """Computes one micro-batch.

        Args:
            batch: (x,), (x, y) or (x, y, sample_weight), as tensors.
            bets: Table name -> float32 `[u, dim]`: the rows of `ids.unique`.
            micro_batch: Its number within the job; seeds dropout.
        """
        with imposed(self._model, self._trainable):  # it may be traced, or run, within this call
            loss, parts, states, metrics = self._call(batch, bets, ids, micro_batch)
        kinds, gradients = self._kinds[self._trainable], []
        for kind, part in zip(kinds, parts, strict=True):
            gradients.append(self._as_part(kind, part, ids))
        first = gradients[0]
        return StepResult(
            loss=float(np.mean(loss)),
            dense=tuple(first.dense.values()),
            slices=first.slices,
            states=_arrays(states),
            metrics=_arrays(metrics),
            divisor=first.divisor if kinds[0] is not None else None,
            losses=first.losses,
            once=self._once[self._trainable],
            parts=tuple(gradients[1:]),
            not_finite=self._division_by_0(gradients),
        )

    def _division_by_0(self, parts: Sequence[GradientPart]) -> str:
        for part, where in zip(parts, self._divisions[self._trainable], strict=True):
            if part.divisor.kind is not DivisorKind.AMOUNT or part.divisor.amount != 0:
                continue
            tensors = (*part.dense.values(), *(slices.values for slices in part.slices.values()))
            if not all(np.isfinite(tensor).all() for tensor in tensors):
                return (
                    f"model {self._model.name!r}: a gradient holds NaN or Inf: operation {where} divides a term of the "
                    "loss by what this micro-batch alone adds to its divisor, and that is 0 here (records without "
                    "positives, or of weight 0, as in sum(y * e) / sum(y)). Use grads_to_wait=1 (--grads-to-wait 1) "
                    "and a larger batch, or tf.math.divide_no_nan in the loss"
                )
        return ""

    def _as_part(self, kind: DivisorKind | None, part: _PartTensors, ids: IdSets) -> GradientPart:
        amount, losses, penalties, dense, planned, unplanned = part
        gathered: dict[str, Slices] = {}
        for table, (values, positions) in planned.items():
            unique = ids.unique[table]
            gathered[table] = Slices(*sum_by_position(unique, np.asarray(positions), np.asarray(values)))
        for number, (values, unique) in unplanned.items():
            table, found = self._unplanned[number], Slices(unique.numpy(), values.numpy())
            gathered[table] = _joined(gathered[table], found) if table in gathered else found
        of_rows = {}
        for table, values in penalties.items():
            of_rows[table] = Slices(ids.unique[table], np.asarray(values)[:, np.newaxis])
        return GradientPart(
            divisor=Divisor(kind or DivisorKind.RECORDS, float(amount)),
            dense=dict(zip(dense, _arrays(dense.values()), strict=True)),
            slices=gathered,
            losses=dict(zip(losses, map(float, losses.values()), strict=True)),
            penalties=of_rows,
        )

    def _body(self, *flat: tf.Tensor) -> _StepTensors:
        batch, bets, inverses, micro_batch = self._unpack(flat)
        set_seeds(self._seed_states, self._seed, micro_batch)
        frozen = frozen_tables(self._model, list(self._plan.layers))
        # Persistent in a graph: there may be several parts to differentiate.
        with tf.GradientTape(persistent=not tf.executing_eagerly()) as tape, self._recording() as recorded:
            # Before their use: a later watch would find no path to the loss.
            tape.watch([bet for table, bet in bets.items() if table not in frozen])
            scope = StepScope(self._plan.layers, inverses, bets, self._lookup, tape)
            loss, penalty = self._forward(batch, scope)
            metrics = _values(self._model.metrics_variables)
            parts = self._parts_of(loss, penalty, recorded, batch, scope)
        parts = self._with_metrics(parts, recorded, batch, scope, metrics)
        self._unplanned = [table for table, _, _ in scope.unplanned]
        self._kinds[self._trainable] = [part.kind for part in parts]
        self._divisions[self._trainable] = [part.where for part in parts]
        return _StepTensors(
            loss if penalty is None else loss + penalty,
            [self._gradient(tape, part, scope, first=part is parts[0]) for part in parts],
            _values(self._states),
            metrics,
        )

    def _recording(self) -> AbstractContextManager[Recording]:
        return recording(all_metrics(self._model) if self._average == "mean" else ())

    def _terms(self, recorded: Recording, batch: TensorBatch, scope: StepScope) -> tuple[LossTerms, Origins]:
        rows = [*scope.bets.values(), *(bet for _, _, bet in scope.unplanned)]
        origins = Origins(batch, rows, recorded.calls)
        return LossTerms(recorded.losses, origins), origins

    def _parts_of(
        self, loss: tf.Tensor, penalty: tf.Tensor | None, recorded: Recording, batch: TensorBatch, scope: StepScope
    ) -> list[LossPart]:
        if self._average is None:
            return [LossPart(None, None, loss if penalty is None else loss + penalty)]
        if tf.executing_eagerly():
            parts = [LossPart(self._plain_kind(), None, loss)]
        else:
            terms, _ = self._terms(recorded, batch, scope)
            parts = loss_parts(self._model, loss, terms.of(loss), self._average, recorded.updates)
        if penalty is None:
            return parts
        recorded.losses.append(RecordedLoss(penalty, (), DivisorKind.ROWS))
        return [*parts, LossPart(DivisorKind.ROWS, None, penalty, penalties=self._penalties(scope))]

    def _with_metrics(
        self,
        parts: Sequence[LossPart],
        recorded: Recording,
        batch: TensorBatch,
        scope: StepScope,
        metrics: Sequence[tf.Tensor],
    ) -> list[LossPart]:
        """The parts with what they add to metrics that are means of numbers of whole batches."""
        means: Sequence[MetricMean] = ()
        if self._average == "mean" and tf.executing_eagerly():
            penalty = parts[-1].loss if parts[-1].kind is DivisorKind.ROWS else None
            means = eager_means(self._model, recorded, int(records_in(batch)), self._plain_kind(), penalty)
        elif self._average == "mean":
            states = {id(var): state for var, state in zip(self._model.metrics_variables, metrics, strict=True)}
            means = metric_means(self._model, recorded, *self._terms(recorded, batch, scope), states)
        self._once[self._trainable] = tuple(mean.place for mean in means if mean.once)
        return parts_with_metrics(parts, means)

    def _plain_kind(self) -> DivisorKind:
        return self._kinds[b""][0] or DivisorKind.RECORDS

    def _penalties(self, scope: StepScope) -> dict[str, tf.Tensor]:
        """Table -> float32 `[u]`: what each row adds to the loss."""
        found: dict[str, tf.Tensor] = {}
        for layer, regularizer in self._regularized(scope):
            table = layer.table_name
            each = functools.partial(_of_one_row, regularizer)
            penalty = tf.vectorized_map(each, tf.stop_gradient(scope.bets[table]))
            found[table] = found[table] + penalty if table in found else penalty
        return found

    def _gradient(self, tape: tf.GradientTape, part: LossPart, scope: StepScope, first: bool) -> _PartTensors:
        """The gradient of a part; the first part has one for every dense variable."""
        if part.loss is None:
            return _of_metrics(part)
        trained = {id(variable) for variable in self._model.trainable_weights}
        variables = [variable.value for variable in self._variables if id(variable) in trained]
        bets = [scope.bets[table] for table in self._tables]
        in_graph = [bet for _, _, bet in scope.unplanned]
        dense, planned, unplanned = _scaled_gradient(
            tape, part.loss, (variables, bets, in_graph), self._model.optimizer
        )
        gradients = iter(dense)
        every = [next(gradients) if id(variable) in trained else None for variable in self._variables]
        return _PartTensors(
            _amount(part.amount),
            dict(part.losses),
            dict(part.penalties),
            {
                place: _dense(gradient, variable.value)
                for place, (gradient, variable) in enumerate(zip(every, self._variables, strict=True))
                if first or gradient is not None
            },
            {
                table: _as_slices(gradient, bet)
                for table, gradient, bet in zip(self._tables, planned, bets, strict=True)
                if first or gradient is not None
            },
            {
                number: (_dense(gradient, bet), unique)
                for number, (gradient, (_, unique, bet)) in enumerate(zip(unplanned, scope.unplanned, strict=True))
                if first or gradient is not None
            },
        )

    def _refuse_unsupported(self) -> None:
        for layer, known in zip(self._plan.layers, self._plan.planned, strict=True):
            if layer.embeddings_regularizer is None:
                continue
            if not known:
                raise Unsupported(
                    f"embedding layer {layer.name!r}: its ids depend on values of the model, so the rows that "
                    "embeddings_regularizer is applied to are not known before the step; leave it out, and add it to "
                    "the loss for the rows that the layer returned"
                )
            if self._average is not None:
                require_rowwise(layer)
        if self._average is not None and self._function is not None:
            self._refuse_eager()

    def _refuse_eager(self) -> None:
        """Traces the step once, because terms are only visible in a graph; refuses a loss of several parts."""
        self._traced().get_concrete_function()
        plain = (DivisorKind.RECORDS, DivisorKind.NOTHING)
        first, *others = self._kinds[b""]
        if first not in plain or any(kind is not DivisorKind.ROWS for kind in others):
            raise Unsupported(
                f"model {self._model.name!r}: compile(run_eagerly=True) with grads_to_wait above 1 and a loss whose "
                "terms are divided by different numbers; leave run_eagerly out"
            )


def _amount(amount: tf.Tensor | None) -> tf.Tensor:
    return tf.constant(0.0, tf.float64) if amount is None else amount


def _dense(gradient: Gradient, source: tf.Tensor) -> tf.Tensor:
    """The gradient of a source; zeros if the loss does not depend on it."""
    return tf.zeros_like(source) if gradient is None else tf.convert_to_tensor(gradient)


def _of_metrics(part: LossPart) -> _PartTensors:
    return _PartTensors(_amount(part.amount), dict(part.losses), {}, {}, {}, {})


def _of_one_row(regularizer: Callable[[tf.Tensor], tf.Tensor], row: tf.Tensor) -> tf.Tensor:
    return tf.cast(regularizer(row[tf.newaxis]), tf.float32)


def _as_slices(gradient: Gradient, bet: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """(values `[n, dim]`, BET positions `[n]`) of a gradient of any form."""
    if gradient is None:
        return tf.zeros([0, bet.shape[1]]), tf.zeros([0], tf.int32)
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values, tf.cast(gradient.indices, tf.int32)
    return gradient, tf.range(tf.shape(bet)[0])


def _joined(one: Slices, other: Slices) -> Slices:
    return Slices(np.concatenate([one.indices, other.indices]), np.concatenate([one.values, other.values]))


# Loss scaling: the gradient of the scaled loss, divided by the scale, so that float16 does not lose small gradients


def _scaled_gradient(
    tape: tf.GradientTape,
    loss: tf.Tensor,
    sources: Sequence[Sequence[tf.Tensor]],
    optimizer: keras.optimizers.Optimizer,
) -> Sequence[Sequence[Gradient]]:
    """`tape.gradient(loss, sources)`, computed at the optimizer's loss scale."""
    dynamic = scale_variables(optimizer)
    static = getattr(optimizer, "loss_scale_factor", None)
    found: Sequence[Sequence[Gradient]]
    if not dynamic and static is None:
        found = tape.gradient(loss, sources)
        return found
    scale = tf.convert_to_tensor(dynamic[0].value if dynamic else static, tf.float32)
    found = tape.gradient(loss, sources, output_gradients=tf.ones_like(loss) * tf.cast(scale, loss.dtype))
    found = tf.nest.map_structure(lambda gradient: _divided(gradient, scale), found)
    return found


def _divided(gradient: Gradient, scale: tf.Tensor) -> Gradient:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_divided(gradient.values, scale), gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(scale, gradient.dtype)


# The compiled step of a model that overrides `train_step`


class OwnTrainStep(TrainStep):
    """Runs the model's `train_step`, whose `step.apply` calls provide the gradients; otherwise like `TrainStep`."""

    def _refuse_unsupported(self) -> None:
        seen_by_tapes(tf.zeros([1, 1]))  # creates its variable outside of any graph
        for layer in self._plan.layers:
            if layer.embeddings_regularizer is not None:
                raise Unsupported(
                    f"embedding layer {layer.name!r}: a model with its own train_step computes the whole loss; leave "
                    "embeddings_regularizer out, and add it to the loss for the rows that the layer returned"
                )

    def _body(self, *flat: tf.Tensor) -> _StepTensors:
        assert self._steps is not None
        batch, bets, inverses, micro_batch = self._unpack(flat)
        scope = OwnStepScope(self._plan.layers, inverses, bets, self._lookup)
        with self._recording() as recorded:
            set_seeds(self._seed_states, self._seed, micro_batch)
            self._model.reset_metrics()
            gathering = Gathering(
                self._model, self._steps.applies, scope, self._average, recorded, batch, list(bets.values())
            )
            with entered(scope), collecting(gathering.apply):
                self._model.train_step(batch)
            gathering.end()
            states, metrics = _values(self._states), _values(self._model.metrics_variables)
        parts = [applied.part for applied in gathering.applied]
        parts = self._with_metrics(parts, recorded, batch, scope, metrics)
        self._unplanned = [table for table, _, _ in scope.unplanned]
        self._kinds[self._trainable] = [part.kind for part in parts]
        self._divisions[self._trainable] = [part.where for part in parts]
        return _StepTensors(
            tf.add_n([tf.reduce_mean(applied.part.loss) for applied in gathering.applied]),
            [
                *(
                    self._pushed(applied, part.losses, scope, first=part is parts[0])
                    for applied, part in zip(gathering.applied, parts, strict=False)
                ),
                *map(_of_metrics, parts[len(gathering.applied) :]),
            ],
            states,
            metrics,
        )

    def _pushed(
        self, applied: Applied, losses: Mapping[int, tf.Tensor], scope: OwnStepScope, first: bool
    ) -> _PartTensors:
        """The gradient of one `step.apply`."""
        frozen = frozen_tables(self._model, list(self._plan.layers))
        planned: dict[str, list[tuple[tf.Tensor, tf.Tensor]]] = {table: [] for table in self._tables}
        unplanned: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}
        for call, gradient in applied.rows.items():
            layer, number, rows = scope.seen[call]
            found = None if layer.table_name in frozen else gradient
            if number is None:
                planned[layer.table_name].append(_as_slices(found, rows))
            else:
                unplanned[number] = (_dense(found, rows), scope.unplanned[number][1])
        return _PartTensors(
            _amount(applied.part.amount),
            dict(losses),
            {},
            {
                place: _dense(applied.dense.get(id(variable)), variable.value)
                for place, variable in enumerate(self._variables)
                if first or id(variable) in applied.dense
            },
            {
                table: tuple(tf.concat(each, 0) for each in zip(*parts, strict=True))
                for table, parts in planned.items()
                if parts
            },
            unplanned,
        )
