"""What a master asks of the dense part of a model, and the dense part of a server without a model. No Keras here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from elastable.master.api import DenseSnapshot, Tensor
from elastable.master.commits.clipping import Clipping
from elastable.master.push_check import TensorSpec

__all__ = ["DensePart", "NoDense", "OptimizerStep", "TableStep"]


@dataclass(frozen=True, slots=True)
class TableStep:
    """What a step needs of the optimizer that a table has of its own.

    Attributes:
        rate: Its learning rate.
        clipping: How it clips the table's gradient.
    """

    rate: float
    clipping: Clipping


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """What a version needs of one optimizer that takes a step.

    Attributes:
        number: Steps that it has taken (Keras' `iterations`); None: no optimizer, every version is one.
        rate: Its learning rate; None: no optimizer, tables have their own.
        clipping: How it clips, all of its gradients together.
        own: By name: those of its tables that have an optimizer of their own.
        places: Of the dense variables that it trains; None: all.
        tables: That it trains; None: all.
    """

    number: int | None = None
    rate: float | None = None
    clipping: Clipping = field(default_factory=Clipping)
    own: Mapping[str, TableStep] = field(default_factory=dict)
    places: tuple[int, ...] | None = None
    tables: tuple[str, ...] | None = None


class DensePart(Protocol):
    """What a master needs of the dense part of a model. Used by one thread at a time."""

    @property
    def variables(self) -> tuple[TensorSpec, ...]:
        """Trainable variables, in model order."""

    @property
    def states(self) -> tuple[TensorSpec, ...]:
        """Non-trainable variables, in model order."""

    @property
    def frozen_tables(self) -> tuple[str, ...]:
        """Tables that take no step on from the version."""

    def steps(self, version: int) -> tuple[OptimizerStep, ...]:
        """The steps of optimizers that lead on from `version`. What is called after it, is of this version."""

    def snapshot(self, version: int) -> DenseSnapshot:
        """Copies of all variables and states."""

    def apply(self, gradients: Sequence[Tensor], states: Sequence[Tensor], rate_share: float = 1.0) -> None:
        """One optimizer step with gradients that are clipped already, at that share of the learning rate.

        States are taken as they are.
        """

    @property
    def may_overflow(self) -> bool:
        """Whether gradients may hold NaN or Inf: then `overflow` is called in the place of `apply`."""

    def overflow(self, states: Sequence[Tensor]) -> None:
        """Takes the states, and no step."""

    def skip(self) -> None:
        """Counts a step that changes nothing."""

    def tensors(self) -> dict[str, Tensor]:
        """Everything that belongs to a version, by key; read-only."""

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes back what `tensors` gave."""


class NoDense:
    """The dense part of a parameter server without a model."""

    variables: tuple[TensorSpec, ...] = ()
    states: tuple[TensorSpec, ...] = ()
    frozen_tables: tuple[str, ...] = ()

    def steps(self, version: int) -> tuple[OptimizerStep, ...]:
        """One, of no optimizer."""
        return (OptimizerStep(),)

    def snapshot(self, version: int) -> DenseSnapshot:
        """No variables, no states."""
        return DenseSnapshot(version, (), ())

    def apply(self, gradients: Sequence[Tensor], states: Sequence[Tensor], rate_share: float = 1.0) -> None:
        """Changes nothing."""

    may_overflow = False

    def overflow(self, states: Sequence[Tensor]) -> None:
        """Changes nothing."""

    def skip(self) -> None:
        """Changes nothing."""

    def tensors(self) -> dict[str, Tensor]:
        """None."""
        return {}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Changes nothing."""
