"""Keras' gradient clipping, over dense gradients and tables together.

Norms are taken in float64, of gradients whose duplicate ids have been summed.
Keras itself, on `IndexedSlices`, clips before it sums duplicates; here a table
is clipped as the equivalent dense gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from elastable.embedding_store.contract.row_data import TableUpdate
from elastable.master.api import Tensor
from elastable.master.commits.accumulate import Accumulated

__all__ = ["Clipping", "clip"]


@dataclass(frozen=True, slots=True)
class Clipping:
    """At most one of Keras' three ways to clip; None: not that one."""

    clipnorm: float | None = None
    global_clipnorm: float | None = None
    clipvalue: float | None = None


def clip(gradient: Accumulated, clipping: Clipping, own: Mapping[str, Clipping] | None = None) -> Accumulated:
    """The gradient, clipped as `keras.optimizers.Optimizer` does.

    clipnorm: each variable and each table by itself is scaled down to that L2
    norm. global_clipnorm: all of them by one factor. clipvalue: each value is
    cut to [-clipvalue, clipvalue].

    Args:
        gradient: Of the dense variables and of every table.
        clipping: Of the model's optimizer: of all that it trains.
        own: Of tables with an optimizer of their own, which the model's neither clips nor counts.
    """
    own = own or {}
    updates = dict(gradient.updates)
    theirs = {table: updates.pop(table) for table in own if table in updates}
    clipped = _clip_jointly(replace(gradient, updates=updates), clipping)
    if not theirs:
        return clipped
    by_itself = [
        _clip_jointly(Accumulated(updates={table: update}), own[table]).updates for table, update in theirs.items()
    ]
    everything = {table: update for part in (clipped.updates, *by_itself) for table, update in part.items()}
    return replace(clipped, updates={table: everything[table] for table in gradient.updates})


def _clip_jointly(gradient: Accumulated, clipping: Clipping) -> Accumulated:
    if clipping.clipnorm is not None:
        limit = clipping.clipnorm
        return _each(gradient, lambda values: _scaled(values, _factor(_square(values), limit)))
    if clipping.global_clipnorm is not None:
        tables = [gradient.updates[table].gradients for table in sorted(gradient.updates)]
        square = math.fsum(_square(values) for values in [*gradient.dense, *tables])
        factor = _factor(square, clipping.global_clipnorm)
        return _each(gradient, lambda values: _scaled(values, factor))
    if clipping.clipvalue is not None:
        bound = clipping.clipvalue
        return _each(gradient, lambda values: np.clip(values, values.dtype.type(-bound), values.dtype.type(bound)))
    return gradient


def _each(gradient: Accumulated, change: Callable[[Tensor], Tensor]) -> Accumulated:
    return replace(
        gradient,
        dense=tuple(change(values) for values in gradient.dense),
        updates={
            table: TableUpdate(update.ids, change(update.gradients)) for table, update in gradient.updates.items()
        },
    )


def _square(values: Tensor) -> float:
    wide = values.astype(np.float64)
    return float(np.sum(wide * wide))


def _factor(square: float, limit: float) -> float:
    norm = math.sqrt(square)
    return limit / norm if norm > limit else 1.0


def _scaled(values: Tensor, factor: float) -> Tensor:
    return values if factor == 1.0 else values * values.dtype.type(factor)
