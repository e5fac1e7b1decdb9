"""What a master asks of the dense part of a model, and how gradients are clipped. No Keras here."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from elastable.embedding_store.shards.server_contract import TableClip
from elastable.master.api import DenseSnapshot, Tensor
from elastable.master.push_check import TensorSpec


@dataclass(frozen=True, slots=True)
class Clipping:
    """At most one of Keras' three ways to clip; None: not that one."""

    clipnorm: float | None = None
    global_clipnorm: float | None = None
    clipvalue: float | None = None

    @property
    def by_norm(self) -> bool:
        """Whether norms have to be known."""
        return self.clipnorm is not None or self.global_clipnorm is not None


Clipped = tuple[tuple[Tensor, ...], dict[str, TableClip]]
"""Gradients of dense variables, clipped; table name -> how its gradient is, where it is not left alone."""


def clip(
    dense: Sequence[Tensor], squares: Mapping[str, float], clipping: Clipping, own: Mapping[str, Clipping] | None = None
) -> Clipped:
    """The gradient, clipped as `keras.optimizers.Optimizer` does.

    clipnorm: each variable and each table by itself is scaled down to that L2 norm. global_clipnorm: all of them by one
    factor. clipvalue: each value is cut to [-clipvalue, clipvalue].

    Norms are taken in float64, of gradients whose duplicate ids have been summed: a table is clipped as the equivalent
    dense gradient, where Keras itself, on `IndexedSlices`, clips before it sums duplicates.

    Args:
        squares: Table name -> the sum of the squares of its gradient; where nothing is clipped by norm, any number.
        clipping: Of the model's optimizer: of all that it trains.
        own: Of tables with an optimizer of their own, which the model's neither clips nor counts.
    """
    own = own or {}
    alike = {table: square for table, square in squares.items() if table not in own}
    clipped, tables = _clip_jointly(dense, alike, clipping)
    for table, of_table in own.items():
        if table in squares:
            tables |= _clip_jointly((), {table: squares[table]}, of_table)[1]
    return clipped, tables


def _clip_jointly(dense: Sequence[Tensor], squares: Mapping[str, float], clipping: Clipping) -> Clipped:
    if clipping.clipnorm is not None:
        limit = clipping.clipnorm
        scales = {table: _factor(square, limit) for table, square in squares.items()}
        return tuple(_scaled(values, _factor(_square(values), limit)) for values in dense), _clips(scales)
    if clipping.global_clipnorm is not None:
        square = math.fsum([*(_square(values) for values in dense), *squares.values()])
        factor = _factor(square, clipping.global_clipnorm)
        return tuple(_scaled(values, factor) for values in dense), _clips(dict.fromkeys(squares, factor))
    if clipping.clipvalue is not None:
        bound = clipping.clipvalue
        cut = tuple(np.clip(values, values.dtype.type(-bound), values.dtype.type(bound)) for values in dense)
        return cut, dict.fromkeys(squares, TableClip(bound=bound))
    return tuple(dense), {}


def _clips(scales: Mapping[str, float]) -> dict[str, TableClip]:
    return {table: TableClip(scale) for table, scale in scales.items() if scale != 1.0}


def _square(values: Tensor) -> float:
    wide = values.astype(np.float64)
    return float(np.sum(wide * wide))


def _factor(square: float, limit: float) -> float:
    norm = math.sqrt(square)
    return limit / norm if norm > limit else 1.0


def _scaled(values: Tensor, factor: float) -> Tensor:
    return values if factor == 1.0 else values * values.dtype.type(factor)


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
