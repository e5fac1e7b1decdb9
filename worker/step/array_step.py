"""The steps on JAX and PyTorch: pure functions of arrays, with ids planned and rows gathered in NumPy around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np

from elastable.embedding_store.contract.arrays import Array, Float32, Int32, Int64, aligned
from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.errors import ElastableError, Unsupported
from elastable.embedding_store.native.range_pool import shared_pool
from elastable.embedding_store.shards.server_contract import Slices
from elastable.embedding_store.tables.grouping import sum_by_position
from elastable.master.api import Divisor, DivisorKind, Tensor
from elastable.master.backend.contract import BackendTensor, Gradients, IdFunction, array_backend
from elastable.worker.keras.seeds import draw_seed, draws_kept, seed_states, seed_values
from elastable.worker.keras.structures import BatchSpec, TensorBatch
from elastable.worker.rows.array_calls import ZEROS_COUNT_NOTHING, ArrayPlanScope, ArrayStepScope
from elastable.worker.rows.scope import entered
from elastable.worker.rows.store_layer import StoreLayer
from elastable.worker.step.forward import Forward, forward, update_metrics
from elastable.worker.step.id_set import IdSets
from elastable.worker.step.separable import divisor_kind, refuse_average
from elastable.worker.step.step_plan import collecting, overrides, rehearse
from elastable.worker.step.trainable import (
    StepResult,
    frozen_tables,
    imposed,
    is_constant,
    is_trained,
    scale_variables,
    trained_and_others,
)

_ROWS_A_THREAD = 1 << 14  # fewer are gathered before another thread has begun

# The ids of a step


@dataclass(frozen=True, slots=True)
class ArrayIdPlan:
    """Computes the ids of every embedding call from a batch; see `elastable.worker.step.id_plan.IdPlan`."""

    layers: tuple[StoreLayer, ...]
    tables: tuple[str, ...]
    _function: IdFunction

    def ids(self, batch: TensorBatch, numbers: Sequence[int] | Int64 | None = None) -> list[Int64]:
        """int64 ids of every call, in the shape in which the layer is called; arguments as of `IdPlan.ids`."""
        found = self._function(_without_none(batch)) if self.layers else []
        if len(found) != len(self.layers):
            raise Unsupported(
                f"the model makes {len(found)} embedding calls for this batch, and made {len(self.layers)} for another "
                "one: call an embedding outside of what is repeated for each record (keras.ops.map, scan), and pass "
                "its output in"
            )
        return [layer.ids_of(ids) for layer, ids in zip(self.layers, found, strict=True)]


def plan_array_ids(model: keras.Model, spec: BatchSpec, training: bool | None) -> ArrayIdPlan:
    """The id plan of a step of `model` on batches of `spec`; arguments as of `elastable.worker.step.id_plan.plan_ids`.

    Raises:
        ModelError: an embedding that is not a layer of the model.
        Unsupported: ids that depend on more than the batch.
    """
    layers: list[StoreLayer] = []

    def body(batch: TensorBatch, zero: BackendTensor) -> list[BackendTensor]:
        scope = ArrayPlanScope(zero)
        with entered(scope):
            if training is None:
                model(batch[0], training=False)
            elif training and overrides(model, "train_step"):
                rehearse(model, batch)
            else:
                done = forward(model, batch, training)
                update_metrics(model, done, done.loss)
        calls = [(layer, ids) for layer, ids in scope.calls if not is_constant(model, layer)]
        layers[:] = [layer for layer, _ in calls]
        return [ids for _, ids in calls]

    function = array_backend().ids_of(
        body, _variables_of(model), lambda: [layer.input_dim is not None for layer in layers], bool(model.run_eagerly)
    )
    with draws_kept():
        try:
            function(_without_none(_example(spec, 0)))
        except ElastableError:
            raise
        except Exception:  # noqa: BLE001 - such as a loss that refuses a mean over ids that are all padding
            function(_without_none(_example(spec, 1)))
    return ArrayIdPlan(tuple(layers), tuple(layer.table_name for layer in layers), function)


def _example(spec: BatchSpec, value: int) -> TensorBatch:
    """Two records that hold one number everywhere."""
    batch: TensorBatch = keras.tree.map_structure(
        lambda each: np.full(tuple(2 if size is None else size for size in each.shape), value, each.dtype), spec
    )
    return batch


def _without_none(batch: TensorBatch) -> TensorBatch:
    return tuple(part for part in batch if part is not None)


def _variables_of(model: keras.Model) -> list[keras.Variable]:
    """Whatever a step of the model may read or assign."""
    return [*variables_of(model.variables), *model.metrics_variables, *scale_variables(model.optimizer)]


# One micro-batch


class _Given(NamedTuple):
    """What a step gets besides the rows: its batch, masks of its calls, and which of the touched rows are there."""

    batch: TensorBatch
    masks: dict[int, Any]
    present: dict[str, Any]


class _ArrayStep:
    """A step of a model; arguments as of `elastable.worker.step.train_step.TrainStep`."""

    def __init__(self, model: keras.Model, plan: ArrayIdPlan) -> None:
        self._model, self._plan = model, plan
        self._calls = list(enumerate(plan.layers))
        self._penalised = [layer for layer in dict.fromkeys(plan.layers) if layer.embeddings_regularizer is not None]
        self._variables, self._states = trained_and_others(model)
        self._planned: list[Int64] = []
        self._gathered: dict[int, Float32] = {}

    def _gather(self, bets: Mapping[str, Float32], ids: IdSets) -> tuple[list[Float32], dict[int, Array]]:
        """The rows of every call, in its shape, and the masks of those with padding."""
        rows, masks = [], {}
        eager = array_backend().compares_ids or bool(self._model.run_eagerly)
        self._planned = []
        for call, layer in self._calls:
            table, inverse, shape = layer.table_name, ids.inverses[call], ids.shapes[call]
            given = self._memory(call, len(inverse), layer.output_dim, eager)
            shared_pool().run(partial(_take, bets[table], inverse, given), len(inverse), _ROWS_A_THREAD)
            rows.append(given.reshape(*shape, layer.output_dim))
            unique = ids.unique[table]
            if eager:
                self._planned.append(unique[inverse].reshape(shape))
            if layer.mask_zero:
                masks[call] = (unique != 0)[inverse].reshape(shape)
        return rows, masks

    def _memory(self, call: int, count: int, dim: int, eager: bool) -> Float32:
        """float32 `[count, dim]` for the rows of a call: where the step is compiled, that of the steps before.

        These have read it, and what a backend need not copy is aligned. Code that runs eagerly may keep its rows.
        """
        if eager:
            return np.empty((count, dim), np.float32)
        kept = self._gathered.get(call)
        if kept is None or kept.size < count * dim:
            kept = self._gathered[call] = aligned((count * dim,), np.float32)
        return kept[: count * dim].reshape(count, dim)

    def _forward(
        self, rows: Sequence[BackendTensor], touched: Sequence[BackendTensor], given: _Given, training: bool
    ) -> tuple[BackendTensor, Forward | None]:
        """The loss, and what it is of; metrics are reset and updated."""
        scope = ArrayStepScope(self._plan.layers, rows, given.masks, self._planned)
        self._model.reset_metrics()
        with entered(scope):
            if training and overrides(self._model, "train_step"):
                return self._own_step(given.batch)
            done = forward(self._model, given.batch, training)
            loss = keras.ops.cast(done.loss, "float32") if done.loss.dtype == "float64" else done.loss
            penalty = None
            for layer, part in zip(self._penalised, touched, strict=True):
                if scope.losses_read and is_trained(self._model, layer):
                    assert layer.embeddings_regularizer is not None
                    found = layer.embeddings_regularizer(part * given.present[layer.table_name])
                    penalty = found if penalty is None else penalty + found
            total = loss if penalty is None else loss + penalty
            if training and not array_backend().metrics_see_masks:
                done = replace(done, predicted=keras.tree.map_structure(keras.ops.stop_gradient, done.predicted))
            # On PyTorch Keras multiplies weights by masks in place: those of the loss its gradient needs unchanged.
            copied = keras.tree.map_structure(lambda part: part if part is None else keras.ops.copy(part), done.weight)
            update_metrics(self._model, replace(done, weight=copied), total)
        if len(total.shape):
            raise Unsupported(
                f"model {self._model.name!r}: its loss has a value for each record (reduction 'none'), which Keras' "
                "backends but TensorFlow cannot train: use reduction='sum', or 'sum_over_batch_size'"
            )
        return total, done

    def _own_step(self, batch: TensorBatch) -> tuple[BackendTensor, Forward | None]:
        """The loss of the one `step.apply` of the model's own `train_step`."""
        given: list[tuple[object, ...]] = []
        with collecting(lambda *arguments: given.append(arguments)):
            self._model.train_step(batch)
        whole = all(of in (None, self._model) and by in (None, self._model.optimizer) for _, _, of, by in given)
        if len(given) != 1 or not whole:
            raise Unsupported(
                f"model {self._model.name!r}: its train_step has {len(given)} calls of step.apply; on Keras' "
                f"{array_backend().name} backend it needs one, `with et.step(self) as step: ... step.apply(loss)`, of "
                "the whole model by the optimizer of compile()"
            )
        return given[0][1], None

    def _touched(self, bets: Mapping[str, Float32], ids: IdSets) -> tuple[list[Float32], dict[str, Array]]:
        """For each layer with a regularizer the rows of its table that the batch touches, each once.

        Their number is rounded up to that of all ids, so that a step is compiled once; the rows added are zeros, which
        the regularizers of Keras do not count.
        """
        rows, present = [], {}
        for layer in self._penalised:
            table = layer.table_name
            bet = bets[table]
            size = sum(ids.inverses[call].size for call, each in self._calls if each.table_name == table)
            if not isinstance(layer.embeddings_regularizer, ZEROS_COUNT_NOTHING):
                size = len(bet)
            rows.append(np.concatenate([bet, np.zeros((size - len(bet), bet.shape[1]), np.float32)]))
            present[table] = (np.arange(size) < len(bet)).astype(np.float32)[:, np.newaxis]
        return rows, present


class ArrayEvaluateStep(_ArrayStep):
    """Forward pass and metrics of one micro-batch, as in inference."""

    _function: Callable[..., object] | None = None

    def __call__(self, batch: TensorBatch, bets: Mapping[str, Float32], ids: IdSets) -> tuple[Tensor, ...]:
        """Metric state of this micro-batch only."""
        rows, masks = self._gather(bets, ids)
        touched, present = self._touched(bets, ids)
        given = (rows, touched, _Given(_without_none(batch), masks, present))
        flat = keras.tree.flatten(given)
        if self._function is None:
            places = keras.tree.map_structure(lambda _: 0, given)

            def body(*leaves: BackendTensor) -> None:
                rows, touched, its = keras.tree.pack_sequence_as(places, leaves)
                self._forward(rows, touched, its, training=False)

            self._function = array_backend().update(
                body, flat, _variables_of(self._model), bool(self._model.run_eagerly)
            )
        self._function(*flat)
        return tuple(map(array_backend().copied, self._model.metrics_variables))


class ArrayInferStep(_ArrayStep):
    """What the model predicts for a batch (x,), as in inference."""

    _function: Callable[..., list[Array]] | None = None

    def __call__(self, batch: TensorBatch, bets: Mapping[str, Float32], ids: IdSets) -> list[Array]:
        """The outputs in the order of the model's; arguments as of `ArrayEvaluateStep`."""
        rows, masks = self._gather(bets, ids)
        given = (rows, _Given(batch, masks, {}))
        flat = keras.tree.flatten(given)
        if self._function is None:
            places = keras.tree.map_structure(lambda _: 0, given)

            def body(*leaves: BackendTensor) -> list[BackendTensor]:
                rows, its = keras.tree.pack_sequence_as(places, leaves)
                with entered(ArrayStepScope(self._plan.layers, rows, its.masks, self._planned)):
                    found: list[BackendTensor] = keras.tree.flatten(self._model(its.batch[0], training=False))
                    return found

            self._function = array_backend().update(
                body, flat, _variables_of(self._model), bool(self._model.run_eagerly)
            )
        return self._function(*flat)


class _Function(NamedTuple):
    """The gradient of a step under some flags: by which variables, and what else these flags decide."""

    places: list[int]
    frozen: tuple[str, ...]
    metrics: list[keras.Variable]
    step: Gradients


class ArrayTrainStep(_ArrayStep):
    """Forward, backward and metrics of one micro-batch."""

    def __init__(
        self, model: keras.Model, spec: BatchSpec, plan: ArrayIdPlan, seed: int | None, average: str | None
    ) -> None:
        super().__init__(model, plan)
        self._seed, self._average, self._seed_states = seed, average, seed_states(model, seed)
        self._like = [
            (tuple(each.shape), keras.backend.standardize_dtype(each.value.dtype)) for each in self._variables
        ]
        self._functions: dict[bytes, _Function] = {}
        self._trainable = b""
        self._kind = None if average is None else divisor_kind(model, average, spec)

    def hold(self, trainable: bytes) -> None:
        """Trains what these flags (`read_trainable`) select from now on; b"": the model's current flags."""
        self._trainable = trainable

    def __call__(self, batch: TensorBatch, bets: Mapping[str, Float32], ids: IdSets, micro_batch: int) -> StepResult:
        """Computes one micro-batch; arguments as of `elastable.worker.step.train_step.TrainStep`."""
        rows, masks = self._gather(bets, ids)
        touched, present = self._touched(bets, ids)
        given = _Given(_without_none(batch), masks, present)
        preset = seed_values(self._seed_states, self._seed, micro_batch)
        function = self._function()
        with array_backend().runs:  # nobody else draws meanwhile
            if self._seed is not None:
                array_backend().seed_draws(draw_seed(self._seed, micro_batch))
            (loss, scale), dense, of_rows = function.step([*rows, *touched], given, preset)
        gradients = dict(zip(function.places, (_unscaled(each, scale) for each in dense), strict=True))
        slices = self._slices([_unscaled(each, scale) for each in of_rows], ids, function.frozen)
        copied = array_backend().copied
        return StepResult(
            loss=float(loss),
            dense=tuple(
                np.zeros(*like) if (found := gradients.get(place)) is None else found
                for place, like in enumerate(self._like)
            ),
            slices=slices,
            states=tuple(map(copied, self._states)),
            metrics=tuple(map(copied, function.metrics)),
            divisor=None if self._kind is None else Divisor(self._kind, 0.0),
            losses=self._losses(float(loss), function.metrics),
        )

    def _losses(self, loss: float, metrics: Sequence[keras.Variable]) -> dict[int, float]:
        """Place of Keras' loss metric, whose mean over records a loss that is a sum is not -> the loss."""
        tracker = getattr(self._model, "_loss_tracker", None)
        if self._average != "mean" or self._kind is not DivisorKind.NOTHING or tracker is None:
            return {}
        return {place: loss for place, each in enumerate(metrics) if each is tracker.total}

    def _function(self) -> _Function:
        """The gradient for the flags that are held now."""
        found = self._functions.get(self._trainable)
        if found is None:
            flags = self._trainable

            def body(arrays: Sequence[BackendTensor], given: _Given) -> tuple[BackendTensor, Any]:
                with imposed(self._model, flags):
                    return self._body(arrays, given)

            with imposed(self._model, flags):
                trainable = {id(each) for each in self._model.trainable_weights}
                frozen = frozen_tables(self._model, list(self._plan.layers))
            places = [place for place, each in enumerate(self._variables) if id(each) in trainable]
            every = [*_variables_of(self._model), *self._seed_states]
            step = array_backend().gradients(
                body, every, [self._variables[place] for place in places], bool(self._model.run_eagerly)
            )
            found = _Function(places, frozen, list(self._model.metrics_variables), step)
            self._functions[flags] = found
        return found

    def _body(self, arrays: Sequence[BackendTensor], given: _Given) -> tuple[BackendTensor, Any]:
        calls = len(self._plan.layers)
        loss, done = self._forward(arrays[:calls], arrays[calls:], given, training=True)
        if done is not None and self._kind is DivisorKind.RECORDS and self._average == "mean":
            for predicted in keras.tree.flatten(done.predicted):
                if getattr(predicted, "_keras_mask", None) is not None:
                    refuse_average(self._model, "its output has a mask, and the loss is divided by what is left")
        dynamic = scale_variables(self._model.optimizer)
        scale = dynamic[0].value if dynamic else getattr(self._model.optimizer, "loss_scale_factor", None)
        scale = keras.ops.cast(1.0 if scale is None else scale, "float32")
        return loss * keras.ops.cast(scale, loss.dtype), (loss, scale)

    def _slices(self, of_rows: Sequence[Float32 | None], ids: IdSets, frozen: Sequence[str]) -> dict[str, Slices]:
        """The sum of each table's gradients by id: of all calls, and of what regularizers add."""
        parts = [(layer.table_name, ids.inverses[call]) for call, layer in self._calls]
        for layer in self._penalised:
            unique = ids.unique[layer.table_name]
            parts.append((layer.table_name, np.arange(len(unique), dtype=np.int32)))
        given: dict[str, list[tuple[Any, Float32]]] = {table: [] for table in self._plan.tables}
        for (table, at), gradient in zip(parts, of_rows, strict=True):
            if gradient is not None and table not in frozen:
                given[table].append((at, gradient.reshape(-1, gradient.shape[-1])[: len(at)]))  # it may be padded
        found = {}
        for table, each in given.items():
            unique = ids.unique[table]
            if not each:
                found[table] = Slices(unique[:0], np.zeros((0, self._dim_of(table)), np.float32))
                continue
            at, values = each[0] if len(each) == 1 else map(np.concatenate, zip(*each, strict=True))
            found[table] = Slices(*sum_by_position(unique, at, values))
        return found

    def _dim_of(self, table: str) -> int:
        return next(layer.output_dim for layer in self._plan.layers if layer.table_name == table)


def _take(rows: Float32, places: Int32, given: Float32, start: int, stop: int) -> None:
    rows.take(places[start:stop], axis=0, out=given[start:stop], mode="clip")  # the other modes copy once more


def _unscaled(gradient: Array | None, scale: Array) -> Array | None:
    return gradient if gradient is None or scale == 1 else (gradient / scale).astype(gradient.dtype)
