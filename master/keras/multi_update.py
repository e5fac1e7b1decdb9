"""The dense part of a model whose own `train_step` applies gradients several times, or by several optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import keras
import numpy as np

from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.errors import Unsupported
from elastable.master.api import Tensor
from elastable.master.commits.dense_part import OptimizerStep
from elastable.master.keras.dense import DenseState
from elastable.master.keras.dense_tensors import DenseTensors

__all__ = ["Apply", "DenseModel", "ModelPart", "MultiUpdateState", "Steps", "dense_part"]


class Apply(Protocol):
    """One `step.apply`; see `elastable.worker.step.traced.step_trace.PlannedApply`, which says what each member is."""

    @property
    def turn(self) -> int: ...
    @property
    def optimizer(self) -> keras.Optimizer: ...
    @property
    def layers(self) -> tuple[keras.Layer, ...]: ...
    @property
    def weights(self) -> tuple[keras.Variable, ...]: ...
    @property
    def variables(self) -> tuple[keras.Variable, ...]: ...
    @property
    def tables(self) -> tuple[str, ...]: ...


class Steps(Protocol):
    """What a step of a model does; see `elastable.worker.step.traced.step_plan.StepPlan`."""

    @property
    def applies(self) -> Sequence[Apply]: ...
    @property
    def turns(self) -> int: ...
    @property
    def several(self) -> bool: ...
    @property
    def variables(self) -> tuple[keras.Variable, ...]: ...
    @property
    def states(self) -> tuple[keras.Variable, ...]: ...


@dataclass(frozen=True, slots=True)
class ModelPart:
    """What `DenseState` needs of a model, for some of its layers.

    Attributes:
        optimizer: A Keras optimizer, which trains them.
        layers: With all that they contain.
        weights: The trainable weights of the layers when the part was made.
        trainable: As of a model.
    """

    optimizer: keras.Optimizer
    layers: tuple[keras.Layer, ...]
    weights: tuple[keras.Variable, ...]
    trainable: bool = True

    @property
    def trainable_weights(self) -> list[keras.Variable]:
        return list(self.weights)

    def _flatten_layers(self, include_self: bool = True, recursive: bool = True) -> list[keras.Layer]:
        return list(self.layers)


class MultiUpdateState(DenseTensors):
    """A dense part whose step from version v makes the updates of turn v % turns.

    Variables are the weights that any update changes; states are all others.

    Args:
        model: A compiled and built model.
        steps: What a step of it does.

    Raises:
        Unsupported: naming what of an optimizer cannot be honoured.
    """

    may_overflow = False

    def __init__(self, model: keras.Model, steps: Steps) -> None:
        super().__init__(model, steps.variables, steps.states)
        self._steps = steps
        self._updates = [DenseState(ModelPart(each.optimizer, each.layers, each.weights)) for each in steps.applies]
        self._tables = tuple(sorted(layer.table_name for layer in model._flatten_layers() if _in_store(layer)))
        position = {id(variable): number for number, variable in enumerate(self.trained)}
        self._positions = [tuple(position[id(variable)] for variable in each.variables) for each in steps.applies]
        self._known = {id(weight) for weight in variables_of(model.trainable_weights)}
        self._turn = 0
        self.hold(variables_of(model.trainable_weights))

    def hold(
        self,
        trainable: Sequence[keras.Variable],
        frozen_tables: tuple[str, ...] = (),
        flags: bytes = b"",
        any_table: bool = True,
    ) -> None:
        """See `DenseState.hold`.

        Raises:
            Unsupported: something is unfrozen that was frozen when the step was planned.
        """
        strangers = [variable.path for variable in trainable if id(variable) not in self._known]
        if strangers:
            raise Unsupported(
                f"{', '.join(strangers)} could not be trained when its train_step was planned: set trainable=True "
                "before training begins, and freeze it then"
            )
        wanted, self._frozen, self._flags = {id(variable) for variable in trainable}, frozen_tables, flags
        for update, planned in zip(self._updates, self._steps.applies, strict=True):
            active = [variable for variable in planned.variables if id(variable) in wanted]
            update.hold(active, any_table=any(table not in frozen_tables for table in planned.tables))
        self._set_frozen()

    def _set_frozen(self) -> None:
        """Frozen are the tables that `hold` named, and those that no update of this turn changes."""
        trained = {table for at in self._now() for table in self._steps.applies[at].tables}
        self.frozen_tables = tuple(table for table in self._tables if table in self._frozen or table not in trained)

    def steps(self, version: int) -> tuple[OptimizerStep, ...]:
        self._turn = version % self._steps.turns
        self._set_frozen()
        found = []
        for at in self._now():
            update, tables = self._updates[at], self._steps.applies[at].tables
            own = {table: each for table, each in update.table_steps().items() if table in tables}
            found.append(
                OptimizerStep(update.step(), update.learning_rate(), update.clipping, own, self._positions[at], tables)
            )
        _refuse_other_numbers([step for step in found if step.tables])
        return tuple(found)

    def _now(self) -> list[int]:
        return [at for at, each in enumerate(self._steps.applies) if each.turn == self._turn]

    def apply(self, gradients: Sequence[Tensor], states: Sequence[Tensor], rate_share: float = 1.0) -> None:
        for at in self._now():
            update, of_variable = self._updates[at], {
                id(self.trained[place]): gradients[place] for place in self._positions[at]
            }  # fmt: skip
            given = [
                of_variable.get(id(variable), np.zeros(spec.shape, spec.dtype))
                for variable, spec in zip(update.trained, update.variables, strict=True)
            ]
            update.apply(given, (), rate_share)
        self._take_states(states)

    def overflow(self, states: Sequence[Tensor]) -> None:
        """Never called: no optimizer of several scales its loss."""

    def skip(self) -> None:
        self.rewind()
        for at in self._now():
            self._updates[at].skip()

    def finalize_averages(self) -> None:
        """Nothing: no optimizer of several keeps averages."""

    def _optimizers(self) -> Sequence[keras.Optimizer]:
        return list({id(each.optimizer): each.optimizer for each in self._steps.applies}.values())

    def _optimizer_variables(self) -> Sequence[keras.Variable]:
        return [variable for optimizer in self._optimizers() for variable in optimizer.variables]


DenseModel = DenseState | MultiUpdateState
"""The dense part of a Keras model."""


def dense_part(model: keras.Model, steps: Steps | None) -> DenseModel:
    """The dense part of a model.

    Args:
        model: A compiled and built model.
        steps: What its own `train_step` does; None: it has Keras' own.
    """
    return DenseState(model) if steps is None or not steps.several else MultiUpdateState(model, steps)


def _refuse_other_numbers(steps: Sequence[OptimizerStep]) -> None:
    """Raises where tables of one version are at different steps of their optimizers: a commit has one number."""
    if len({step.number for step in steps}) > 1:
        steps_taken = "; ".join(f"{', '.join(step.tables or ())}: {step.number}" for step in steps)
        raise Unsupported(
            f"tables that are updated together have optimizers that have taken different numbers of steps "
            f"({steps_taken}); "
            "let step.apply call each of them equally often, or compute the later loss after the earlier step.apply"
        )


def _in_store(layer: keras.Layer) -> bool:
    return hasattr(layer, "table_spec") and not getattr(layer, "on_worker", False)
