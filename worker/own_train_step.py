"""The compiled step of a model with a `train_step` of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from elastable.embedding_store.errors import ModelError, Unsupported
from elastable.worker.id_plan import IdPlan
from elastable.worker.own_step import Applied, Gathering, OwnStepScope, collecting, overrides
from elastable.worker.reductions import recorded_losses
from elastable.worker.scope import entered
from elastable.worker.seeds import set_seeds
from elastable.worker.tape_scope import seen_by_tapes
from elastable.worker.tensor_specs import flat_spec
from elastable.worker.train_step import Lookup, TrainStep, as_slices, dense_gradient
from elastable.worker.trainable import frozen_tables

__all__ = ["OwnTrainStep", "make_train_step"]


def make_train_step(
    model: Any, spec: Any, plan: IdPlan, lookup: Lookup | None, seed: int | None, average: str | None = None
) -> TrainStep:
    """The step that trains a model: Keras', or its own; arguments as of `TrainStep`."""
    kind = OwnTrainStep if overrides(model, "train_step") else TrainStep
    return kind(model, spec, plan, lookup, seed, average)


class OwnTrainStep(TrainStep):
    """Runs the model's `train_step`, whose `step.apply` yields the gradient. As `TrainStep` otherwise."""

    def __init__(
        self, model: Any, spec: Any, plan: IdPlan, lookup: Lookup | None, seed: int | None, average: str | None = None
    ) -> None:
        for layer in plan.layers:
            if layer.embeddings_regularizer is not None:
                raise Unsupported(
                    f"embedding layer {layer.name!r}: in a train_step of its own the loss is the model's; leave "
                    "embeddings_regularizer out, and add it to the loss for the rows that the layer returned"
                )
        seen_by_tapes(tf.zeros([1, 1]))  # makes its variable, outside of any graph
        super().__init__(model, spec, plan, lookup, seed, average)

    def _refuse_eager(self) -> None:
        """Nothing: `Gathering` refuses it in the first step."""

    def _body(self, *flat: Any) -> Any:
        batch, bets, inverses, micro_batch = self._unpack(flat)
        set_seeds(self._seed_states, self._seed, micro_batch)
        for metric in self._model.metrics:
            metric.reset_state()
        scope = OwnStepScope(self._plan.layers, inverses, bets, self._lookup)
        data = flat[: len(flat_spec(self._spec))]
        with entered(scope), recorded_losses() as recorded:
            gathering = Gathering(self._model, scope, self._average, recorded, data, list(bets.values()))
            with collecting(gathering):
                self._model.train_step(batch)
        if gathering.applied is None:
            raise ModelError(f"model {self._model.name!r}: its train_step did not call step.apply this time")
        self._unplanned = [table for table, _, _ in scope.unplanned]
        self._kinds[self._trainable] = [gathering.applied.kind]
        return (
            gathering.applied.loss,
            [self._pushed(gathering.applied, scope)],
            [tf.convert_to_tensor(variable.value) for variable in self._states],
            self._metric_state(),
        )

    def _pushed(self, applied: Applied, scope: OwnStepScope) -> tuple[Any, ...]:
        """(amount, losses, dense, planned, unplanned) as `TrainStep` gives them."""
        frozen = frozen_tables(self._model, list(self._plan.layers))
        planned: dict[str, list[tuple[Any, Any]]] = {table: [] for table in self._tables}
        unplanned: dict[int, tuple[Any, Any]] = {}
        for (layer, number, rows), gradient in zip(scope.seen, applied.rows, strict=True):
            found = None if layer.table_name in frozen else gradient
            if number is None:
                planned[layer.table_name].append(as_slices(found, rows))
            else:
                dense = tf.zeros_like(rows) if found is None else tf.convert_to_tensor(found)
                unplanned[number] = (dense, scope.unplanned[number][1])
        return (
            tf.constant(0.0, tf.float64) if applied.amount is None else applied.amount,
            {},
            {
                place: dense_gradient(applied.dense.get(id(variable)), variable.value)
                for place, variable in enumerate(self._variables)
            },
            _joined(planned),
            unplanned,
        )


def _joined(planned: Mapping[str, Sequence[tuple[Any, Any]]]) -> dict[str, tuple[Any, Any]]:
    return {
        table: (tf.concat([values for values, _ in parts], 0), tf.concat([positions for _, positions in parts], 0))
        for table, parts in planned.items()
    }
