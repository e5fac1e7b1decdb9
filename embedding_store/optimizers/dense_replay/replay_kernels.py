"""Rows caught up, value by value: first whose coefficients each row needs, then the weights, then the slots.

A row's last slot holds the step up to which it is caught up, the bits of an
int32 in a float32; 0 stands for a row that was never updated. What its step
asks for is a row in a table of coefficients (see `coefficients`). Every loop
over columns stands in a kernel by itself: LLVM runs these many columns at a time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.native.kernel import (
    inlined,
    kernel,
    loads_in_order,
    prefetch,
    prefetch_distance,
    prefetch_line,
)
from elastable.embedding_store.optimizers.dense_replay.coefficients import Bytes

__all__ = [
    "CAUGHT_UP",
    "OF_STEPS",
    "UNTOUCHED",
    "Int32",
    "missing_rows",
    "move_rows",
    "rows_behind",
    "shrink_slots",
    "stamp_rows",
]

Int32 = npt.NDArray[np.int32]

UNTOUCHED, CAUGHT_UP, OF_STEPS = 0, 1, 2
"""Rows of a table of coefficients: see `rows_behind`."""

_STEPS_AHEAD = 32
_SMALLEST = np.float32(1.2e-38)  # smaller numbers are slow, and no optimizer sees them


@kernel
def rows_behind(
    steps: Int32, positions: Int64, known: Bytes, first: int, at: int, which: Int64
) -> tuple[int, int, int]:
    """Which coefficients bring rows to step `at`.

    Args:
        steps: int32 `[rows, width]`, the memory of the slots: the last column is the step.
        positions: int64 `[n]`; negative ones are passed over.
        known: uint8: whether the coefficients of a row are there. Row `UNTOUCHED` is of rows that were
            never updated, row `CAUGHT_UP` changes nothing, row `OF_STEPS + c - first` is of step c.
        first: The first step of the coefficients.
        at: The step to catch up to.
        which: int64 `[n]`, written: the row of the coefficients of each; `CAUGHT_UP` for those of steps before `first`.

    Returns:
        How many rows are behind, but not so far; of how many of them the
        coefficients are missing; and how many are behind `first`.
    """
    last, end = steps.shape[1] - 1, len(positions) - 1
    found = missing = older = 0
    for i in range(len(positions)):
        prefetch_line(steps, positions[min(i + _STEPS_AHEAD, end)], last)
        row = CAUGHT_UP
        if positions[i] >= 0:
            step = steps[positions[i], last]
            if 0 < step < first:
                older += 1
            elif step < at:
                row = step - first + OF_STEPS if step > 0 else UNTOUCHED
                found += 1
                missing += 1 - known[row]
        which[i] = row
    loads_in_order()
    return found, missing, older


@kernel
def missing_rows(which: Int64, known: Bytes, found: Int64) -> int:
    """Writes the rows of coefficients that are asked for and missing, each once; returns how many there are.

    Args:
        which: int64 `[n]`, as of `rows_behind`.
        known: uint8, as of `rows_behind`.
        found: int64, as long as `known` or as `which`.
    """
    count, met = 0, np.zeros(len(known), np.bool_)
    for i in range(len(which)):
        row = which[i]
        if not known[row] and not met[row]:
            met[row] = True
            found[count] = row
            count += 1
    return count


@inlined
def _decayed(weights: Float32, places: Int64, which: Int64, c: Float32) -> None:
    dim = weights.shape[1]
    for i in range(len(which)):
        w, kept = weights[places[i]], c[which[i], 0]
        for j in range(dim):
            w[j] = w[j] * kept


@inlined
def _linear(
    weights: Float32, places: Int64, slots: Float32, positions: Int64, which: Int64, c: Float32, at: int, moving: int
) -> None:
    dim, end = weights.shape[1], len(which) - 1
    far = prefetch_distance(dim)
    for i in range(len(which)):
        prefetch(weights, places[min(i + far, end)])
        prefetch(slots, positions[min(i + far, end)])
        w, m = weights[places[i]], slots[positions[i], moving * dim : (moving + 1) * dim]
        kept, shift = c[which[i], 0], c[which[i], at + 1]
        for j in range(dim):
            w[j] = w[j] * kept + m[j] * shift


@inlined
def _standing(
    weights: Float32,
    places: Int64,
    slots: Float32,
    positions: Int64,
    which: Int64,
    c: Float32,
    at: int,
    moving: int,
    divisor: int,
    epsilon: np.float32,
) -> None:
    """The divisor's root stands still."""
    dim, end = weights.shape[1], len(which) - 1
    far = prefetch_distance(dim)
    for i in range(len(which)):
        prefetch(weights, places[min(i + far, end)])
        prefetch(slots, positions[min(i + far, end)])
        w, m = weights[places[i]], slots[positions[i], moving * dim : (moving + 1) * dim]
        v = slots[positions[i], divisor * dim : (divisor + 1) * dim]
        kept, shift = c[which[i], 0], c[which[i], at + 1]
        for j in range(dim):
            w[j] = w[j] * kept + m[j] * shift / (np.sqrt(v[j]) + epsilon)


@inlined
def _cubic(
    weights: Float32,
    places: Int64,
    slots: Float32,
    positions: Int64,
    which: Int64,
    c: Float32,
    at: int,
    moving: int,
    divisor: int,
    root: bool,
    epsilon: np.float32,
) -> None:
    dim, end, one = weights.shape[1], len(which) - 1, np.float32(1)
    far = prefetch_distance(dim)
    for i in range(len(which)):
        prefetch(weights, places[min(i + far, end)])
        prefetch(slots, positions[min(i + far, end)])
        w, m = weights[places[i]], slots[positions[i], moving * dim : (moving + 1) * dim]
        v = slots[positions[i], divisor * dim : (divisor + 1) * dim]
        row, kept = which[i], c[which[i], 0]
        for s in range(at, c.shape[1], 5):
            centre, m0, m1, m2, m3 = c[row, s], c[row, s + 1], c[row, s + 2], c[row, s + 3], c[row, s + 4]
            for j in range(dim):
                x = (np.sqrt(v[j]) if root else v[j]) * centre
                y = one / (x + epsilon)
                u = x * y
                w[j] = w[j] * kept + m[j] * y * (m0 - u * (m1 - u * (m2 - u * m3)))
            kept = one


@inlined
def _seventh(
    weights: Float32,
    places: Int64,
    slots: Float32,
    positions: Int64,
    which: Int64,
    c: Float32,
    at: int,
    moving: int,
    divisor: int,
    root: bool,
    epsilon: np.float32,
) -> None:
    dim, end, one = weights.shape[1], len(which) - 1, np.float32(1)
    far = prefetch_distance(dim)
    for i in range(len(which)):
        prefetch(weights, places[min(i + far, end)])
        prefetch(slots, positions[min(i + far, end)])
        w, m = weights[places[i]], slots[positions[i], moving * dim : (moving + 1) * dim]
        v = slots[positions[i], divisor * dim : (divisor + 1) * dim]
        row, kept = which[i], c[which[i], 0]
        for s in range(at, c.shape[1], 9):
            centre, m0, m1, m2, m3 = c[row, s], c[row, s + 1], c[row, s + 2], c[row, s + 3], c[row, s + 4]
            m4, m5, m6, m7 = c[row, s + 5], c[row, s + 6], c[row, s + 7], c[row, s + 8]
            for j in range(dim):
                x = (np.sqrt(v[j]) if root else v[j]) * centre
                y = one / (x + epsilon)
                u = x * y
                high = m4 - u * (m5 - u * (m6 - u * m7))
                w[j] = w[j] * kept + m[j] * y * (m0 - u * (m1 - u * (m2 - u * (m3 - u * high))))
            kept = one


@kernel
def move_rows(
    weights: Float32,
    places: Int64,
    slots: Float32,
    positions: Int64,
    which: Int64,
    coefficients: Float32,
    factors: int,
    moving: int,
    divisor: int,
    root: bool,
    epsilon: np.float32,
    degree: int,
) -> None:
    """Brings the weights of rows to the step of the coefficients, in place; slots stay as they are.

    Args:
        weights: float32 `[some rows, dim]`.
        places: int64 `[m]`, of rows that are behind.
        slots: float32 `[other rows, width]`.
        positions: int64 `[m]`, of the same rows.
        which: int64 `[m]`, as of `rows_behind`.
        coefficients: float32 `[rows, columns]`.
        factors: Slots that steps multiply, the first ones.
        moving, divisor, root, epsilon: As of `DenseForm`.
        degree: As of `Segments`.
    """
    c, at = coefficients, 1 + factors
    if moving < 0:
        _decayed(weights, places, which, c)
    elif divisor < 0:
        _linear(weights, places, slots, positions, which, c, at, moving)
    elif degree == 0:
        _standing(weights, places, slots, positions, which, c, at, moving, divisor, epsilon)
    elif degree == 3 and root:
        _cubic(weights, places, slots, positions, which, c, at, moving, divisor, True, epsilon)
    elif degree == 3:
        _cubic(weights, places, slots, positions, which, c, at, moving, divisor, False, epsilon)
    elif root:
        _seventh(weights, places, slots, positions, which, c, at, moving, divisor, True, epsilon)
    else:
        _seventh(weights, places, slots, positions, which, c, at, moving, divisor, False, epsilon)


@kernel
def shrink_slots(slots: Float32, positions: Int64, which: Int64, coefficients: Float32, dim: int, factors: int) -> None:
    """Brings the slots of rows to the step of the coefficients, after `move_rows`; arguments are as of that.

    `dim` columns are a slot's.
    """
    for k in range(factors):
        for i in range(len(positions)):
            part, factor = slots[positions[i], k * dim : (k + 1) * dim], coefficients[which[i], 1 + k]
            for j in range(dim):
                x = part[j] * factor
                part[j] = x if abs(x) > _SMALLEST else np.float32(0)


@kernel
def stamp_rows(steps: Int32, positions: Int64, stamp: int) -> None:
    """The rows at positions int64 `[n]` are caught up to the step `stamp`."""
    last = steps.shape[1] - 1
    for i in range(len(positions)):
        steps[positions[i], last] = stamp
