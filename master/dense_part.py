"""What a master asks of the dense part of a model, and the dense part of a server without a model. No Keras here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from elastable.master.api import DenseSnapshot, Tensor
from elastable.master.clipping import Clipping
from elastable.master.push_check import TensorSpec

__all__ = ["DensePart", "NoDense", "OwnStep"]


@dataclass(frozen=True, slots=True)
class OwnStep:
    """What a step needs of the optimizer that a table has of its own.

    Attributes:
        rate: Its learning rate.
        clipping: How it clips the table's gradient.
    """

    rate: float
    clipping: Clipping


class DensePart(Protocol):
    """What a master needs of the dense part of a model. Used by one thread at a time."""

    @property
    def variables(self) -> tuple[TensorSpec, ...]:
        """Trainable variables, in model order."""

    @property
    def states(self) -> tuple[TensorSpec, ...]:
        """Non-trainable variables, in model order."""

    @property
    def clipping(self) -> Clipping:
        """How gradients are to be clipped before `apply`."""

    @property
    def frozen_tables(self) -> tuple[str, ...]:
        """Tables that take no step."""

    def step(self) -> int | None:
        """Optimizer steps taken (Keras' `iterations`); None: no optimizer, every version is one."""

    def learning_rate(self) -> float | None:
        """Of the next step; None: no optimizer, tables have their own."""

    def own_steps(self) -> Mapping[str, OwnStep]:
        """Of the next step, by name: tables that have an optimizer of their own."""

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
    clipping = Clipping()
    frozen_tables: tuple[str, ...] = ()

    def step(self) -> int | None:
        """None: every version is a step."""
        return None

    def learning_rate(self) -> float | None:
        """None: tables have their own."""
        return None

    def own_steps(self) -> Mapping[str, OwnStep]:
        """None: there are no layers."""
        return {}

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
