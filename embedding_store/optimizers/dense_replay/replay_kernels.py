"""Rows caught up, value by value: first whose coefficients each row needs, then the weights, then the slots.

A row's last slot holds the step up to which it is caught up, the bits of an int32 in a float32; 0 means a row that
was never updated. Each step indexes a table of coefficients (see `coefficients`). Every loop over columns is a separate
kernel: LLVM runs these many columns at a time.
"""

from collections.abc import Callable

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int32, Int64, UInt8
from elastable.embedding_store.native.intrinsics import loads_in_order, prefetch_line
from elastable.embedding_store.native.kernel import inlined, kernel, prefetch, prefetch_distance
from elastable.embedding_store.optimizers.base import DenseForm

Columns = Callable[[Float32, Float32, Float32, Float32, int, np.float32], None]
"""Moves a row: `columns(weights, moving slot, divisor, coefficients, where its segments begin, epsilon)`."""

RowsBehind = tuple[Float32, Int64, Float32, Int64, Int64, Float32]
"""Rows that are behind: weights, places, slots, positions, which, coefficients.

Weights are float32 `[some rows, dim]`, and `places` int64 `[m]` says where they are; slots are float32
`[other rows, width]` at `positions` int64 `[m]`. `which` int64 `[m]` says which row of the coefficients float32
`[rows, columns]` each row needs, as of `rows_behind`.
"""

UNTOUCHED, CAUGHT_UP, OF_STEPS = 0, 1, 2
"""Rows of a table of coefficients: see `rows_behind`."""

_STEPS_AHEAD = 32
_SMALLEST = np.float32(1.2e-38)  # smaller numbers are slow, and no optimizer sees them


@kernel
def rows_behind(
    steps: Int32, positions: Int64, known: UInt8, first: int, at: int, which: Int64
) -> tuple[int, int, int]:
    """Which coefficients bring rows to step `at`.

    Args:
        steps: int32 `[rows, width]`, the memory of the slots: the last column is the step.
        positions: int64 `[n]`; negative ones are passed over.
        known: uint8: whether the coefficients of a row are there. Row `UNTOUCHED` is of rows that were
            never updated, row `CAUGHT_UP` changes nothing, row `OF_STEPS + c - first` is of step c.
        first: The first step of the coefficients.
        at: The step to replay up to.
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
def missing_rows(which: Int64, known: UInt8, found: Int64) -> int:
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
def cubic(u: np.float32, a: np.float32, b: np.float32, c: np.float32, d: np.float32) -> np.float32:
    """The polynomial of degree 3 that replaces a segment of missed steps."""
    return a - u * (b - u * (c - u * d))


@inlined
def shrunk(slot: np.float32, factor: np.float32) -> np.float32:
    """A slot multiplied by its factor, or 0."""
    x = slot * factor
    return x if abs(x) > _SMALLEST else np.float32(0)


@inlined
def _decayed(w: Float32, m: Float32, v: Float32, c: Float32, at: int, epsilon: np.float32) -> None:
    kept = c[0]
    for j in range(len(w)):
        w[j] = w[j] * kept


@inlined
def _linear(w: Float32, m: Float32, v: Float32, c: Float32, at: int, epsilon: np.float32) -> None:
    kept, shift = c[0], c[at + 1]
    for j in range(len(w)):
        w[j] = w[j] * kept + m[j] * shift


def _of_degree_0(divisor: Callable[[np.float32], np.float32]) -> Columns:
    """The divisor does not change."""

    @inlined
    def columns(w: Float32, m: Float32, v: Float32, c: Float32, at: int, epsilon: np.float32) -> None:
        kept, shift = c[0], c[at + 1]
        for j in range(len(w)):
            w[j] = w[j] * kept + m[j] * shift / (divisor(v[j]) + epsilon)

    return columns


def _of_degree_3(divisor: Callable[[np.float32], np.float32]) -> Columns:
    @inlined
    def columns(w: Float32, m: Float32, v: Float32, c: Float32, at: int, epsilon: np.float32) -> None:
        kept, one = c[0], np.float32(1)
        for s in range(at, len(c), 5):
            centre, m0, m1, m2, m3 = c[s], c[s + 1], c[s + 2], c[s + 3], c[s + 4]
            for j in range(len(w)):
                x = divisor(v[j]) * centre
                y = one / (x + epsilon)
                w[j] = w[j] * kept + m[j] * y * cubic(x * y, m0, m1, m2, m3)
            kept = one

    return columns


def _of_degree_7(divisor: Callable[[np.float32], np.float32]) -> Columns:
    @inlined
    def columns(w: Float32, m: Float32, v: Float32, c: Float32, at: int, epsilon: np.float32) -> None:
        kept, one = c[0], np.float32(1)
        for s in range(at, len(c), 9):
            centre, m0, m1, m2, m3 = c[s], c[s + 1], c[s + 2], c[s + 3], c[s + 4]
            m4, m5, m6, m7 = c[s + 5], c[s + 6], c[s + 7], c[s + 8]
            for j in range(len(w)):
                x = divisor(v[j]) * centre
                y = one / (x + epsilon)
                u = x * y
                w[j] = w[j] * kept + m[j] * y * cubic(u, m0, m1, m2, m3 - u * cubic(u, m4, m5, m6, m7))
            kept = one

    return columns


@inlined
def _root(value: np.float32) -> np.float32:
    root: np.float32 = np.sqrt(value)
    return root


@inlined
def _itself(value: np.float32) -> np.float32:
    return value


def _over_rows(columns: Columns) -> Callable[..., None]:
    """The loop over rows around what moves the columns of one."""

    def rows(behind: RowsBehind, at: int, moving: int, divisor: int, epsilon: np.float32) -> None:
        weights, places, slots, positions, which, c = behind
        dim, end = weights.shape[1], len(which) - 1
        ahead = prefetch_distance(dim)
        for i in range(len(which)):
            prefetch(weights, places[min(i + ahead, end)])
            prefetch(slots, positions[min(i + ahead, end)])
            s = slots[positions[i]]
            m, v = s[moving * dim : (moving + 1) * dim], s[divisor * dim : (divisor + 1) * dim]
            columns(weights[places[i]], m, v, c[which[i]], at, epsilon)

    return rows


_DECAY, LINEAR = kernel(_over_rows(_decayed)), kernel(_over_rows(_linear))
DIVIDED = {  # by the degree of the polynomials, and whether the divisor's root divides
    (degree, root): kernel(_over_rows(columns(_root if root else _itself)))
    for degree, columns in ((0, _of_degree_0), (3, _of_degree_3), (7, _of_degree_7))
    for root in (False, True)
}


def move_rows(behind: RowsBehind, form: DenseForm, degree: int) -> None:
    """Brings the weights of rows to the step of the coefficients, in place; slots stay as they are.

    Args:
        behind: The rows.
        form: Of the optimizer.
        degree: As of `Segments`.
    """
    move = _DECAY if form.moving < 0 else LINEAR if form.divisor < 0 else DIVIDED[degree, form.root]
    at, moving, divisor = 1 + len(form.factors), max(form.moving, 0), max(form.divisor, 0)
    move(behind, at, moving, divisor, np.float32(form.epsilon))


@kernel
def shrink_slots(slots: Float32, positions: Int64, which: Int64, coefficients: Float32, dim: int, factors: int) -> None:
    """Brings the slots of rows to the step of the coefficients, after `move_rows`; arguments are as of that.

    `dim` columns are a slot's.
    """
    for k in range(factors):
        for i in range(len(positions)):
            part, factor = slots[positions[i], k * dim : (k + 1) * dim], coefficients[which[i], 1 + k]
            for j in range(dim):
                part[j] = shrunk(part[j], factor)


@kernel
def stamp_rows(steps: Int32, positions: Int64, stamp: int) -> None:
    """The rows at positions int64 `[n]` are caught up to the step `stamp`."""
    last = steps.shape[1] - 1
    for i in range(len(positions)):
        steps[positions[i], last] = stamp
