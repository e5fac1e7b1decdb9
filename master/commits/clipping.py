"""Keras' gradient clipping, over dense gradients and tables together."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.shards.server_contract import TableClip
from elastable.master.api import Tensor


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
