"""The compiled step of a model that overrides `train_step`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from elastable.embedding_store.errors import Unsupported
from elastable.worker.keras.seeds import set_seeds
from elastable.worker.keras.structures import BatchSpec
from elastable.worker.losses.loss_parts import LossPart
from elastable.worker.rows.scope import entered
from elastable.worker.step.id_plan import IdPlan
from elastable.worker.step.model_step import Lookup, PartTensors
from elastable.worker.step.traced.own_step import Applied, Gathering, OwnStepScope, collecting
from elastable.worker.step.traced.step_plan import StepPlan
from elastable.worker.step.traced.tape_scope import seen_by_tapes
from elastable.worker.step.train_step import StepTensors, TrainStep, as_slices, dense_gradient, dense_parts, of_metrics
from elastable.worker.step.trainable import frozen_tables

__all__ = ["OwnTrainStep"]


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
        parts = [LossPart(applied.kind, applied.amount, applied.loss) for applied in gathering.applied]
        parts = self._with_metrics(parts, recorded, batch, scope, metrics)
        self._unplanned = [table for table, _, _ in scope.unplanned]
        self._kinds[self._trainable] = [part.kind for part in parts]
        return StepTensors(
            tf.add_n([tf.reduce_mean(applied.loss) for applied in gathering.applied]),
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
            tf.constant(0.0, tf.float64) if applied.amount is None else applied.amount,
            dict(losses),
            {},
            {
                place: dense_gradient(applied.dense.get(id(variable)), variable.value)
                for place, variable in enumerate(self._variables)
                if first or id(variable) in applied.dense
            },
            _joined(planned),
            unplanned,
        )


def _values(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(variable.value) for variable in variables]


def _joined(planned: Mapping[str, Sequence[tuple[tf.Tensor, tf.Tensor]]]) -> dict[str, tuple[tf.Tensor, tf.Tensor]]:
    return {
        table: (tf.concat([values for values, _ in parts], 0), tf.concat([positions for _, positions in parts], 0))
        for table, parts in planned.items()
        if parts
    }
