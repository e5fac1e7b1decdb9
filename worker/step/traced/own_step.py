"""Runs a user's `train_step`, written with `et.step`: `step.apply` computes a gradient to push, not an update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import keras

from elastable.embedding_store.errors import ModelError, Unsupported
from elastable.master.backend.lazy import tf
from elastable.worker.keras.structures import Gradient, TensorBatch
from elastable.worker.losses.loss_parts import LossPart, loss_parts
from elastable.worker.losses.loss_terms import LossTerms
from elastable.worker.losses.origins import Origins
from elastable.worker.losses.recording import Recording
from elastable.worker.rows.scope import StepScope, seen_by_tapes
from elastable.worker.rows.store_layer import StoreLayer
from elastable.worker.step.traced.step_plan import PlannedApply, Trained


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
