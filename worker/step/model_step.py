"""The base of training and evaluation steps: a model with Batch Embedding Tensors instead of tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import keras
import numpy as np
import tensorflow as tf

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.errors import ModelError, Unsupported
from elastable.master.api import Tensor
from elastable.worker.keras.structures import BatchSpec, TensorBatch
from elastable.worker.rows.scope import StepScope, entered
from elastable.worker.rows.store_layer import StoreLayer
from elastable.worker.step.batch_checks import flat_spec, pack_flat
from elastable.worker.step.forward import forward, update_metrics, warn_of_values
from elastable.worker.step.id_plan import IdPlan
from elastable.worker.step.id_set import IdSets
from elastable.worker.step.traced.own_step import overrides
from elastable.worker.step.trainable import is_trained

__all__ = ["EvaluateStep", "Lookup", "ModelStep", "PartTensors", "arrays"]

#: (table, int64 ids) -> float32 rows, for calls that could not be planned.
Lookup = Callable[[str, Int64], Float32]


class PartTensors(NamedTuple):
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


Output = TypeVar("Output")


class ModelStep(Generic[Output]):
    """A compiled call of a model with BETs instead of tables.

    Args:
        model: A compiled and built model.
        spec: TypeSpecs of its batches.
        plan: Its id plan.
        lookup: For calls that could not be planned.
        training: Whether the model trains.
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
        inputs = [
            *flat_spec(spec),
            *(tf.TensorSpec([None, self._dims[table]], tf.float32) for table in self._tables),
            *(tf.TensorSpec([None], tf.int32) for _ in plan.tables),
            tf.TensorSpec([], tf.int64),
        ]
        self._inputs = inputs
        self._function: Callable[..., Output] | None = self._untraced()

    def _untraced(self) -> Callable[..., Output] | None:
        return self._body if getattr(self._model, "run_eagerly", False) else None

    def _body(self, *flat: tf.Tensor) -> Output:
        raise ModelError("a step without a body")

    def _call(self, batch: TensorBatch, bets: Mapping[str, tf.Tensor], ids: IdSets, micro_batch: int) -> Output:
        if self._function is None:
            # A concrete function: calls skip the search for a matching trace.
            self._function = self._traced().get_concrete_function()
        flat = tf.nest.flatten(batch, expand_composites=True)
        arrays = [*(bets[table] for table in self._tables), *ids.inverses, np.int64(micro_batch)]
        return self._function(*flat, *map(tf.convert_to_tensor, arrays))

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
            penalty = self._penalty(scope)
            if penalty is not None and done.loss.shape.rank != 0:
                raise Unsupported(
                    f"model {self._model.name!r}: a loss with a value for each record (reduction 'none') cannot be "
                    "combined with an embeddings_regularizer, in Keras either; use reduction='sum'"
                )
            update_metrics(self._model, done, done.loss if penalty is None else done.loss + penalty)
        return done.loss, penalty

    def _penalty(self, scope: StepScope) -> tf.Tensor | None:
        terms = [penalty(scope.bets[layer.table_name]) for layer, penalty in self._regularized(scope)]
        return tf.add_n(terms) if terms else None

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

    def _metric_state(self) -> list[tf.Tensor]:
        return [tf.convert_to_tensor(variable.value) for variable in self._model.metrics_variables]


class EvaluateStep(ModelStep[list[tf.Tensor]]):
    """Forward pass and metrics of one micro-batch, as in inference."""

    def __init__(self, model: keras.Model, spec: BatchSpec, plan: IdPlan, lookup: Lookup | None) -> None:
        super().__init__(model, spec, plan, lookup, training=False)
        self._warned = False

    def __call__(self, batch: TensorBatch, bets: Mapping[str, Float32], ids: IdSets) -> tuple[Tensor, ...]:
        """Metric state of this micro-batch only; arguments as in `TrainStep`."""
        return arrays(self._call(batch, bets, ids, 0))

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
        return self._metric_state()


def arrays(tensors: Sequence[tf.Tensor]) -> tuple[Tensor, ...]:
    """The tensors as NumPy arrays."""
    # numpy() of a scalar tensor is not an array.
    return tuple(np.asarray(tensor.numpy()) for tensor in tensors)
