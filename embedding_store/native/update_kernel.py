"""The one loop over rows that every fused optimizer runs, compiled for the optimizer's step on a single value."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.native.kernel import by_whole_lines, inlined, kernel, prefetch_columns, prefetch_distance

__all__ = ["Scalars", "UpdateKernel", "ValueStep", "update_kernel"]

F = np.float32

Scalars = tuple[float | np.floating, ...]
"""What a step needs besides the rows, the same for all of them."""

ValueStep = Callable[..., tuple[F, ...]]
"""`step(weight, gradient, *slots, rate, scalars)`: the new weight and the new slots, all float32.

The weight has been decayed already. Compiled into the loop, so it calls kernels and numpy's functions alone.
"""

_Arguments = tuple[Float32, Int64, Float32, Int64, Float32, F, F, Scalars]

UpdateKernel = Callable[[int, _Arguments], None]
"""`update(dim, (weights, places, slots, positions, gradients, rate, decay, scalars))`, as of `RowOptimizer`."""

_Columns = Callable[[Float32, Float32, Float32, int, F, F, Scalars], None]
"""All values of one row: `columns(weights, slots, gradients, dim, rate, decay, scalars)`."""


def update_kernel(step: ValueStep, slots: int, twice: bool = False) -> UpdateKernel:
    """A kernel that takes an optimizer's step on every value of some rows.

    Args:
        step: The optimizer's step on one value.
        slots: How many slots it has, each as wide as the weights: 0 to 3.
        twice: Whether the loop is compiled once more for rows of whole cache lines, for optimizers that are limited
            by computation.
    """
    value = inlined(step)
    columns = (_without_slots, _with_slot, _with_2_slots, _with_3_slots)[slots](value)

    def rows(dim: int, arguments: _Arguments) -> None:
        weights, places, states, positions, gradients, rate, decay, scalars = arguments
        last, ahead = len(gradients) - 1, prefetch_distance(dim)
        for i in range(len(gradients)):
            later = min(i + ahead, last)
            prefetch_columns(weights, places[later], dim)
            prefetch_columns(states, positions[later], slots * dim)
            columns(weights[places[i]], states[positions[i]], gradients[i], dim, rate, decay, scalars)

    return kernel(by_whole_lines(rows) if twice else rows)


def _without_slots(step: ValueStep) -> _Columns:
    @inlined
    def columns(w: Float32, s: Float32, g: Float32, dim: int, rate: F, decay: F, scalars: Scalars) -> None:
        for j in range(dim):
            (w[j],) = step(w[j] - w[j] * decay * rate, g[j], rate, scalars)

    return columns


def _with_slot(step: ValueStep) -> _Columns:
    @inlined
    def columns(w: Float32, s: Float32, g: Float32, dim: int, rate: F, decay: F, scalars: Scalars) -> None:
        for j in range(dim):
            w[j], s[j] = step(w[j] - w[j] * decay * rate, g[j], s[j], rate, scalars)

    return columns


def _with_2_slots(step: ValueStep) -> _Columns:
    @inlined
    def columns(w: Float32, s: Float32, g: Float32, dim: int, rate: F, decay: F, scalars: Scalars) -> None:
        a, b = s[:dim], s[dim : 2 * dim]
        for j in range(dim):
            w[j], a[j], b[j] = step(w[j] - w[j] * decay * rate, g[j], a[j], b[j], rate, scalars)

    return columns


def _with_3_slots(step: ValueStep) -> _Columns:
    @inlined
    def columns(w: Float32, s: Float32, g: Float32, dim: int, rate: F, decay: F, scalars: Scalars) -> None:
        a, b, c = s[:dim], s[dim : 2 * dim], s[2 * dim : 3 * dim]
        for j in range(dim):
            w[j], a[j], b[j], c[j] = step(w[j] - w[j] * decay * rate, g[j], a[j], b[j], c[j], rate, scalars)

    return columns
