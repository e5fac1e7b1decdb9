"""The compiled steps: of `compile()`'s loss, with loss scaling, and of a model's own `train_step`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.errors import Unsupported
from elastable.embedding_store.tables import sum_by_position
from elastable.master.api import Divisor, DivisorKind, GradientPart, Slices, Tensor
from elastable.worker.keras.seeds import seed_states, set_seeds
from elastable.worker.keras.structures import BatchSpec, Gradient, TensorBatch
from elastable.worker.losses.loss_parts import LossPart, loss_parts, parts_with_metrics, require_rowwise
from elastable.worker.losses.loss_terms import LossTerms
from elastable.worker.losses.metric_means import MetricMean, all_metrics, eager_means, metric_means
from elastable.worker.losses.origins import Origins
from elastable.worker.losses.recording import RecordedLoss, Recording, recording
from elastable.worker.rows.scope import StepScope, entered
from elastable.worker.step.batch_checks import records_in
from elastable.worker.step.id_plan import IdPlan
from elastable.worker.step.id_set import IdSets
from elastable.worker.step.model_step import Lookup, ModelStep, PartTensors, arrays
from elastable.worker.step.traced.own_step import Applied, Gathering, OwnStepScope, collecting
from elastable.worker.step.traced.step_plan import StepPlan
from elastable.worker.step.traced.tape_scope import seen_by_tapes
from elastable.worker.step.trainable import frozen_tables, imposed

__all__ = [
    "OwnTrainStep",
    "StepResult",
    "StepTensors",
    "TrainStep",
    "as_slices",
    "dense_gradient",
    "dense_parts",
    "of_metrics",
    "scale_variables",
]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one micro-batch; see `elastable.master.api.Push` for the shapes."""

    loss: float
    dense: tuple[Tensor, ...]
    slices: Mapping[str, Slices]
    states: tuple[Tensor, ...]
    metrics: tuple[Tensor, ...]
    divisor: Divisor | None = None
    losses: Mapping[int, float] = field(default_factory=dict)
    once: tuple[int, ...] = ()
    parts: tuple[GradientPart, ...] = ()
    not_finite: str = ""


class StepTensors(NamedTuple):
    """What the compiled step returns; `parts` has one entry for each part of the loss."""

    loss: tf.Tensor
    parts: list[PartTensors]
    states: list[tf.Tensor]
    metrics: list[tf.Tensor]


class TrainStep(ModelStep[StepTensors]):
    """Forward, backward and metrics of one micro-batch.

    Args:
        model: A compiled and built model.
        spec: TypeSpecs of its batches.
        plan: Its id plan.
        lookup: For calls that could not be planned.
        seed: Seed of dropout; None: random layers continue from their current state, as in Keras.
        average: How micro-batches are combined (`JobSpec.average`); None: each is a version.
        parts: The model's variables and states; None: `dense_parts(model)`.

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
        parts: tuple[Sequence[keras.Variable], Sequence[keras.Variable]] | None = None,
    ) -> None:
        self._seed = seed
        self._variables, self._states = dense_parts(model) if parts is None else parts
        self._trainable = b""
        self._traces: dict[bytes, Callable[..., StepTensors] | None] = {}
        self._average = average
        self._seed_states = seed_states(model, seed)
        self._unplanned: list[str] = []
        self._kinds: dict[bytes, list[DivisorKind | None]] = {}
        self._divisions: dict[bytes, list[str]] = {}
        self._once: dict[bytes, tuple[int, ...]] = {}
        super().__init__(model, spec, plan, lookup, training=True)
        _refuse_unplanned_regularizers(plan)
        if average is not None:
            for layer in plan.layers:
                if layer.embeddings_regularizer is not None:
                    require_rowwise(layer)
            if self._function is not None:
                self._refuse_eager()

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
            ids: The id sets of the batch.
            micro_batch: Its number within the job; seeds dropout.
        """
        with imposed(self._model, self._trainable):  # it may be traced, or run, within this call
            loss, parts, states, metrics = self._call(batch, bets, ids, micro_batch)
        kinds = self._kinds[self._trainable]
        gradients = [self._as_part(kind, part, ids) for kind, part in zip(kinds, parts, strict=True)]
        first = gradients[0]
        return StepResult(
            loss=float(np.mean(loss)),
            dense=tuple(first.dense.values()),
            slices=first.slices,
            states=arrays(states),
            metrics=arrays(metrics),
            divisor=first.divisor if kinds[0] is not None else None,
            losses=first.losses,
            once=self._once[self._trainable],
            parts=tuple(gradients[1:]),
            not_finite=self._division_by_0(gradients),
        )

    def _division_by_0(self, parts: Sequence[GradientPart]) -> str:
        for part, where in zip(parts, self._divisions[self._trainable], strict=True):
            tensors = (*part.dense.values(), *(slices.values for slices in part.slices.values()))
            zero = part.divisor.kind is DivisorKind.AMOUNT and part.divisor.amount == 0
            if zero and not all(np.isfinite(tensor).all() for tensor in tensors):
                return (
                    f"model {self._model.name!r}: a gradient holds NaN or Inf: operation {where} divides a term of the "
                    "loss by what this micro-batch alone adds to its divisor, and that is 0 here (records without "
                    "positives, or of weight 0, as in sum(y * e) / sum(y)). Use grads_to_wait=1 (--grads-to-wait 1) "
                    "and a larger batch, or tf.math.divide_no_nan in the loss"
                )
        return ""

    def _as_part(self, kind: DivisorKind | None, part: PartTensors, ids: IdSets) -> GradientPart:
        amount, losses, penalties, dense, planned, unplanned = part
        gathered: dict[str, list[Slices]] = {}
        for table, (values, positions) in planned.items():
            unique = ids.unique[table]
            present, sums = sum_by_position(np.asarray(positions), np.asarray(values), len(unique))
            indices = unique if len(present) == len(unique) else unique[present]
            gathered.setdefault(table, []).append(Slices(indices, sums))
        for number, (values, unique) in unplanned.items():
            gathered.setdefault(self._unplanned[number], []).append(Slices(unique.numpy(), values.numpy()))
        return GradientPart(
            divisor=Divisor(kind or DivisorKind.RECORDS, float(amount)),
            dense={place: np.asarray(gradient.numpy()) for place, gradient in dense.items()},
            slices={table: _joined(parts) for table, parts in gathered.items()},
            losses={place: float(value) for place, value in losses.items()},
            penalties={
                table: Slices(ids.unique[table], np.asarray(values)[:, np.newaxis])
                for table, values in penalties.items()
            },
        )

    def _body(self, *flat: tf.Tensor) -> StepTensors:
        batch, bets, inverses, micro_batch = self._unpack(flat)
        set_seeds(self._seed_states, self._seed, micro_batch)
        frozen = frozen_tables(self._model, list(self._plan.layers))
        # Persistent in a graph: there may be several parts to differentiate.
        with tf.GradientTape(persistent=not tf.executing_eagerly()) as tape, self._recording() as recorded:
            # Before their use: a later watch would find no path to the loss.
            tape.watch([bet for table, bet in bets.items() if table not in frozen])
            scope = StepScope(self._plan.layers, inverses, bets, self._lookup, tape)
            loss, penalty = self._forward(batch, scope)
            metrics = self._metric_state()
            parts = self._parts_of(loss, penalty, recorded, batch, scope)
        parts = self._with_metrics(parts, recorded, batch, scope, metrics)
        self._unplanned = [table for table, _, _ in scope.unplanned]
        self._kinds[self._trainable] = [part.kind for part in parts]
        self._divisions[self._trainable] = [part.where for part in parts]
        return StepTensors(
            loss if penalty is None else loss + penalty,
            [self._gradient(tape, part, scope, first=part is parts[0]) for part in parts],
            [tf.convert_to_tensor(variable.value) for variable in self._states],
            metrics,
        )

    def _recording(self) -> AbstractContextManager[Recording]:
        return recording(all_metrics(self._model) if self._average == "mean" else ())

    def _terms(self, recorded: Recording, batch: TensorBatch, scope: StepScope) -> tuple[LossTerms, Origins]:
        rows = [*scope.bets.values(), *(bet for _, _, bet in scope.unplanned)]
        origins = Origins(batch, rows, recorded.calls)
        return LossTerms(recorded.losses, origins), origins

    def _parts_of(
        self,
        loss: tf.Tensor,
        penalty: tf.Tensor | None,
        recorded: Recording,
        batch: TensorBatch,
        scope: StepScope,
    ) -> list[LossPart]:
        if self._average is None:
            return [LossPart(None, None, loss if penalty is None else loss + penalty)]
        if tf.executing_eagerly():
            parts = [LossPart(self._plain_kind(), None, loss)]
        else:
            terms, _ = self._terms(recorded, batch, scope)
            parts = loss_parts(self._model, loss, terms.of(loss), self._average)
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
            each = functools.partial(_of_one_row, regularizer)
            penalty = tf.vectorized_map(each, tf.stop_gradient(scope.bets[layer.table_name]))
            table = layer.table_name
            found[table] = found[table] + penalty if table in found else penalty
        return found

    def _gradient(self, tape: tf.GradientTape, part: LossPart, scope: StepScope, first: bool) -> PartTensors:
        """The gradient of a part; the first part has one for every dense variable."""
        if part.loss is None:
            return of_metrics(part)
        trained = {id(variable) for variable in self._model.trainable_weights}
        variables = [variable.value for variable in self._variables if id(variable) in trained]
        bets = [scope.bets[table] for table in self._tables]
        in_graph = [bet for _, _, bet in scope.unplanned]
        dense, planned, unplanned = scaled_gradient(tape, part.loss, (variables, bets, in_graph), self._model.optimizer)
        gradients = iter(dense)
        every = [next(gradients) if id(variable) in trained else None for variable in self._variables]
        return PartTensors(
            tf.constant(0.0, tf.float64) if part.amount is None else part.amount,
            dict(part.losses),
            dict(part.penalties),
            {
                place: dense_gradient(gradient, variable.value)
                for place, (gradient, variable) in enumerate(zip(every, self._variables, strict=True))
                if first or gradient is not None
            },
            {
                table: as_slices(gradient, bet)
                for table, gradient, bet in zip(self._tables, planned, bets, strict=True)
                if first or gradient is not None
            },
            {
                number: (tf.zeros_like(bet) if gradient is None else tf.convert_to_tensor(gradient), unique)
                for number, (gradient, (_, unique, bet)) in enumerate(zip(unplanned, scope.unplanned, strict=True))
                if first or gradient is not None
            },
        )

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


def _refuse_unplanned_regularizers(plan: IdPlan) -> None:
    for layer, known in zip(plan.layers, plan.planned, strict=True):
        if not known and layer.embeddings_regularizer is not None:
            raise Unsupported(
                f"embedding layer {layer.name!r}: its ids depend on values of the model, so the rows that "
                "embeddings_regularizer is applied to are not known before the step; leave it out, and add it to the "
                "loss for the rows that the layer returned"
            )


def dense_parts(model: keras.Model, steps: StepPlan | None = None) -> tuple[list[keras.Variable], list[keras.Variable]]:
    """The weights of a model in model order: those its optimizer trains, or will train, and all others.

    The others include a dynamic loss scale (`loss_scale`).

    Args:
        model: A built model.
        steps: The plan of its own `train_step`; the first list then has the weights that its updates change.
    """
    if steps is not None and steps.several:
        return list(steps.variables), list(steps.states)
    optimizer: keras.optimizers.Optimizer = getattr(model, "optimizer", None)
    weights = variables_of(model.weights)
    variables = optimizer._trainable_variables if getattr(optimizer, "built", False) else model.trainable_weights
    known = {id(variable) for variable in variables}
    others = [each for each in weights if id(each) not in known]
    return [each for each in weights if id(each) in known], [*others, *scale_variables(optimizer)]


def dense_gradient(gradient: Gradient, variable: tf.Variable) -> tf.Tensor:
    """The gradient of a variable; zeros if the loss does not depend on it."""
    return tf.zeros_like(variable) if gradient is None else tf.convert_to_tensor(gradient)


def of_metrics(part: LossPart) -> PartTensors:
    """What a part that is of metrics alone pushes: no gradient."""
    amount = tf.constant(0.0, tf.float64) if part.amount is None else part.amount
    return PartTensors(amount, dict(part.losses), {}, {}, {}, {})


def _of_one_row(regularizer: Callable[[tf.Tensor], tf.Tensor], row: tf.Tensor) -> tf.Tensor:
    return tf.cast(regularizer(row[tf.newaxis]), tf.float32)


def as_slices(gradient: Gradient, bet: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """(values `[n, dim]`, BET positions `[n]`) of a gradient of any form."""
    if gradient is None:
        return tf.zeros([0, bet.shape[1]]), tf.zeros([0], tf.int32)
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values, tf.cast(gradient.indices, tf.int32)
    return gradient, tf.range(tf.shape(bet)[0])


def _joined(parts: Sequence[Slices]) -> Slices:
    if len(parts) == 1:
        return parts[0]
    return Slices(np.concatenate([part.indices for part in parts]), np.concatenate([part.values for part in parts]))


# Loss scaling: the gradient of the scaled loss, divided by the scale, so that float16 does not lose small gradients


_KEPT = "_elastable_loss_scale"


def scale_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variable of a dynamic loss scale as a list; empty if the optimizer has none."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return []
    if optimizer.built:
        return [optimizer.dynamic_scale]
    if not hasattr(optimizer, _KEPT):
        # A worker's optimizer makes no steps: it is not built, so it allocates no moments.
        scale = keras.Variable(optimizer.initial_scale, dtype="float32", trainable=False, name="dynamic_scale")
        object.__setattr__(optimizer, _KEPT, scale)
    return [getattr(optimizer, _KEPT)]


def scaled_gradient(
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
    """Runs the model's `train_step`, whose `step.apply` calls provide the gradients; otherwise like `TrainStep`.

    Args:
        model, spec, plan, lookup, seed, average: As of `TrainStep`.
        steps: The plan of the step.
    """

    def __init__(
        self,
        model: keras.Model,
        spec: BatchSpec,
        plan: IdPlan,
        lookup: Lookup | None,
        seed: int | None,
        average: str | None,
        steps: StepPlan,
    ) -> None:
        for layer in plan.layers:
            if layer.embeddings_regularizer is not None:
                raise Unsupported(
                    f"embedding layer {layer.name!r}: a model with its own train_step computes the whole loss; leave "
                    "embeddings_regularizer out, and add it to the loss for the rows that the layer returned"
                )
        seen_by_tapes(tf.zeros([1, 1]))  # creates its variable outside of any graph
        self._steps = steps
        super().__init__(model, spec, plan, lookup, seed, average, dense_parts(model, steps))

    def _refuse_eager(self) -> None:
        """Does nothing: `Gathering` refuses it in the first step."""

    def _body(self, *flat: tf.Tensor) -> StepTensors:
        batch, bets, inverses, micro_batch = self._unpack(flat)
        scope = OwnStepScope(self._plan.layers, inverses, bets, self._lookup)
        with self._recording() as recorded:
            set_seeds(self._seed_states, self._seed, micro_batch)
            self._model.reset_metrics()
            gathering = Gathering(
                self._model, self._steps.applies, scope, self._average, recorded, batch, list(bets.values())
            )
            with entered(scope), collecting(gathering):
                self._model.train_step(batch)
            gathering.end()
            states, metrics = map(_values, (self._states, self._model.metrics_variables))
        parts = [applied.part for applied in gathering.applied]
        parts = self._with_metrics(parts, recorded, batch, scope, metrics)
        self._unplanned = [table for table, _, _ in scope.unplanned]
        self._kinds[self._trainable] = [part.kind for part in parts]
        self._divisions[self._trainable] = [part.where for part in parts]
        return StepTensors(
            tf.add_n([tf.reduce_mean(applied.part.loss) for applied in gathering.applied]),
            [
                *(
                    self._pushed(applied, part.losses, scope, first=part is parts[0])
                    for applied, part in zip(gathering.applied, parts, strict=False)
                ),
                *map(of_metrics, parts[len(gathering.applied) :]),
            ],
            states,
            metrics,
        )

    def _pushed(
        self, applied: Applied, losses: Mapping[int, tf.Tensor], scope: OwnStepScope, first: bool
    ) -> PartTensors:
        """The gradient of one `step.apply`."""
        frozen = frozen_tables(self._model, list(self._plan.layers))
        planned: dict[str, list[tuple[tf.Tensor, tf.Tensor]]] = {table: [] for table in self._tables}
        unplanned: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}
        for call, gradient in applied.rows.items():
            layer, number, rows = scope.seen[call]
            found = None if layer.table_name in frozen else gradient
            if number is None:
                planned[layer.table_name].append(as_slices(found, rows))
            else:
                dense = tf.zeros_like(rows) if found is None else tf.convert_to_tensor(found)
                unplanned[number] = (dense, scope.unplanned[number][1])
        return PartTensors(
            tf.constant(0.0, tf.float64) if applied.part.amount is None else applied.part.amount,
            dict(losses),
            {},
            {
                place: dense_gradient(applied.dense.get(id(variable)), variable.value)
                for place, variable in enumerate(self._variables)
                if first or id(variable) in applied.dense
            },
            _joined_parts(planned),
            unplanned,
        )


def _values(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(variable.value) for variable in variables]


def _joined_parts(
    planned: Mapping[str, Sequence[tuple[tf.Tensor, tf.Tensor]]],
) -> dict[str, tuple[tf.Tensor, tf.Tensor]]:
    return {
        table: (tf.concat([values for values, _ in parts], 0), tf.concat([positions for _, positions in parts], 0))
        for table, parts in planned.items()
        if parts
    }
