"""What a master asks of the dense part of a model. No Keras here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastable.master.api import DenseSnapshot, Tensor
from elastable.master.commits.clipping import Clipping
from elastable.master.push_check import TensorSpec


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """What a version needs of one optimizer that takes a step.

    Attributes:
        number: Steps that it has taken (Keras' `iterations`); None: no optimizer, every version is one.
        rate: Its learning rate; None: no optimizer, tables have their own.
        clipping: How it clips, all of its gradients together.
        own: By name: rate and clipping of its tables that have a separate optimizer.
        places: Of the dense variables that it trains; None: all.
        tables: That it trains; None: all.
    """

    number: int | None = None
    rate: float | None = None
    clipping: Clipping = field(default_factory=Clipping)
    own: "Mapping[str, OptimizerStep]" = field(default_factory=dict)
    places: tuple[int, ...] | None = None
    tables: tuple[str, ...] | None = None


class DensePart:
    """The dense part of a model; this class itself, of a server without one: no variables, and nothing to change.

    Used by one thread at a time.

    Attributes:
        variables: Trainable variables, in model order.
        states: Non-trainable variables, in model order.
        frozen_tables: Tables that the next step leaves alone.
        may_overflow: Whether gradients may hold NaN or Inf: then `overflow` is called instead of `apply`.
    """

    variables: tuple[TensorSpec, ...] = ()
    states: tuple[TensorSpec, ...] = ()
    frozen_tables: tuple[str, ...] = ()
    may_overflow: bool = False

    def steps(self) -> tuple[OptimizerStep, ...]:
        """The optimizer steps that lead on from the current version, to which all later calls refer."""
        return (OptimizerStep(),)

    def snapshot(self, version: int, tensors: Mapping[str, Tensor] | None = None) -> DenseSnapshot:
        """Read-only copies of all variables and states.

        Args:
            tensors: What `tensors` returned, if nothing has changed since; None: all is read.
        """
        return DenseSnapshot(version, (), ())

    def apply(self, gradients: Sequence[Tensor], states: Sequence[Tensor], rate_share: float = 1.0) -> None:
        """One optimizer step.

        Args:
            gradients: Of every variable, in model order, clipped; those of frozen variables are ignored.
            states: New values of every state, in model order.
            rate_share: The factor of this step's learning rate, weight decay included.
        """

    def overflow(self, states: Sequence[Tensor]) -> None:
        """Takes the states, and no step."""

    def skip(self) -> None:
        """Counts a step that changes nothing, so that schedules follow the version."""

    def tensors(self) -> dict[str, Tensor]:
        """Everything that belongs to a version, by key; read-only."""
        return {}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores what `tensors` returned."""
