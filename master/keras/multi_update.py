"""The dense part of a model whose own `train_step` applies gradients several times, or by several optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import keras
import numpy as np

from elastable.embedding_store.errors import Unsupported
from elastable.master.api import DenseSnapshot, Tensor
from elastable.master.commits.dense_part import OptimizerStep
from elastable.master.keras.dense import DenseState
from elastable.master.keras.dense_tensors import DenseTensors, copied, tensor_specs
from elastable.master.keras.discovery import table_optimizers

__all__ = ["Apply", "DenseModel", "MultiUpdateState", "Steps", "dense_part"]


class Apply(Protocol):
    """One `step.apply`; see `elastable.worker.step.traced.step_trace.PlannedApply`."""

    @property
    def turn(self) -> int:
        """In which its update is made."""

    @property
    def optimizer(self) -> keras.Optimizer:
        """A Keras optimizer."""

    @property
    def layers(self) -> tuple[keras.Layer, ...]:
        """Whose weights and tables it trains."""

    @property
    def weights(self) -> tuple[keras.Variable, ...]:
        """What the optimizer is built for."""

    @property
    def variables(self) -> tuple[keras.Variable, ...]:
        """Those that the update changes."""

    @property
    def tables(self) -> tuple[str, ...]:
        """Those that the update changes."""


class Steps(Protocol):
    """What a step of a model does; see `elastable.worker.step.traced.step_plan.StepPlan`."""

    @property
    def applies(self) -> Sequence[Apply]:
        """Every update, in order."""

    @property
    def turns(self) -> int:
        """Versions that a step makes."""

    @property
    def several(self) -> bool:
        """Whether it is anything but one update of the whole model by the optimizer of `compile()`."""

    @property
    def variables(self) -> tuple[keras.Variable, ...]:
        """Weights that an update changes, in model order."""

    @property
    def states(self) -> tuple[keras.Variable, ...]:
        """All others."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What `DenseState` needs of a model, for the layers of one `step.apply`."""

    optimizer: keras.Optimizer
    layers: tuple[keras.Layer, ...]
    weights: tuple[keras.Variable, ...]
    trainable: bool = True

    @property
    def trainable_weights(self) -> list[keras.Variable]:
        return list(self.weights)

    def _flatten_layers(self, include_self: bool = True, recursive: bool = True) -> list[keras.Layer]:
        return list(self.layers)


class MultiUpdateState:
    """Keeps `elastable.master.commits.dense_part.DensePart`: on version v the updates of turn v % turns are made.

    Variables are the weights that any update changes; states are all others.

    Args:
        model: A compiled and built model.
        steps: What a step of it does.

    Raises:
        Unsupported: naming what of an optimizer cannot be honoured.
    """

    may_overflow = False

    def __init__(self, model: keras.Model, steps: Steps) -> None:
        self._steps = steps
        self._weights = list(model.weights)
        self.trained, self._states = list(steps.variables), list(steps.states)
        self.variables, self.states = tensor_specs(self.trained), tensor_specs(self._states)
        self._updates = [DenseState(_Part(each.optimizer, each.layers, each.weights)) for each in steps.applies]
        self._tables = tuple(sorted(layer.table_name for layer in model._flatten_layers() if _in_store(layer)))
        self._own = table_optimizers(model)
        places = {id(variable): place for place, variable in enumerate(self.trained)}
        self._places = [tuple(places[id(variable)] for variable in each.variables) for each in steps.applies]
        self._known = {id(weight) for weight in model.trainable_weights}
        self._known_tables = {table for each in steps.applies for table in each.tables}
        self._turn = 0
        self._standing: tuple[Tensor, ...] | None = None
        self.hold(model.trainable_weights)

    def hold(
        self,
        trainable: Sequence[keras.Variable],
        frozen_tables: tuple[str, ...] = (),
        flags: bytes = b"",
        any_table: bool = True,
    ) -> None:
        """As of `DenseState`.

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

    @property
    def frozen_tables(self) -> tuple[str, ...]:
        """Those that are frozen, and those that no update of this turn changes."""
        trained = {table for at in self._now() for table in self._steps.applies[at].tables}
        return tuple(table for table in self._tables if table in self._frozen or table not in trained)

    def steps(self, version: int) -> tuple[OptimizerStep, ...]:
        """Of the optimizers of this turn."""
        self._turn = version % self._steps.turns
        found = []
        for at in self._now():
            update, tables = self._updates[at], self._steps.applies[at].tables
            own = {table: each for table, each in update.table_steps().items() if table in tables}
            found.append(
                OptimizerStep(update.step(), update.learning_rate(), update.clipping, own, self._places[at], tables)
            )
        _refuse_other_numbers([step for step in found if step.tables])
        return tuple(found)

    def _now(self) -> list[int]:
        return [at for at, each in enumerate(self._steps.applies) if each.turn == self._turn]

    def snapshot(self, version: int) -> DenseSnapshot:
        """Read-only copies of all variables and states."""
        self._standing = tuple(copied(variable) for variable in self._states)
        return DenseSnapshot(
            version,
            tuple(copied(variable) for variable in self.trained),
            self._standing,
            tuple(spec.name for spec in self.variables),
            tuple(spec.name for spec in self.states),
            self._flags,
        )

    def rewind(self) -> None:
        """As of `DenseState`."""
        for variable, value in zip(self._states, self._standing or (), strict=False):
            variable.assign(value)

    def apply(self, gradients: Sequence[Tensor], states: Sequence[Tensor], rate_share: float = 1.0) -> None:
        """One step of every optimizer of this turn; arguments as of `DenseState.apply`."""
        for at in self._now():
            update, of_variable = self._updates[at], {
                id(self.trained[place]): gradients[place] for place in self._places[at]
            }  # fmt: skip
            given = [
                of_variable.get(id(variable), np.zeros(spec.shape, spec.dtype))
                for variable, spec in zip(update.trained, update.variables, strict=True)
            ]
            update.apply(given, (), rate_share)
        for variable, value in zip(self._states, states, strict=True):
            variable.assign(value)
        self._standing = None

    def overflow(self, states: Sequence[Tensor]) -> None:
        """Never called: no optimizer of several scales its loss."""

    def skip(self) -> None:
        """Counts a step, of every optimizer of this turn, that changes nothing."""
        self.rewind()
        for at in self._now():
            self._updates[at].skip()

    def finalize_averages(self) -> None:
        """Nothing: no optimizer of several keeps averages."""

    def tensors(self) -> dict[str, Tensor]:
        """As of `DenseTensors`; the optimizers' variables in the order in which the step comes to them."""
        return self._kept().tensors()

    def weights(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """As of `DenseTensors`."""
        return self._kept().weights(tensors)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """As of `DenseTensors`."""
        self._kept().restore(tensors)
        self._standing = None

    def _kept(self) -> DenseTensors:
        optimizers = {id(each.optimizer): each.optimizer for each in self._steps.applies}
        variables = [variable for optimizer in optimizers.values() for variable in optimizer.variables]
        return DenseTensors(self._weights, self.trained, self._states, variables, list(self._own.values()))


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
        told = "; ".join(f"{', '.join(step.tables or ())}: {step.number}" for step in steps)
        raise Unsupported(
            f"tables that are updated together have optimizers that have taken different numbers of steps ({told}); "
            "let step.apply call each of them equally often, or compute the later loss after the earlier step.apply"
        )


def _in_store(layer: keras.Layer) -> bool:
    return hasattr(layer, "table_spec") and not getattr(layer, "on_worker", False)
