"""How the sum over missed steps is cut, so that a short polynomial stands for each piece. Pure planning.

A row that missed n steps moves by sum_k d_k m / (r^k x + epsilon), k = 1 ... n,
with d_k in proportion to b^k (b, r: what moment and divisor are multiplied by
at each step). Within a segment of k in which r^k stays near its centre c,

    1 / (r^k x + epsilon) = y / (1 + u (r^k / c - 1)),   y = 1 / (c x + epsilon),   u = c x y in [0, 1)

is a geometric series in -u (r^k / c - 1), so that a segment's sum is y times a
polynomial in u, whose coefficients hold for every value of every row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float64
from elastable.embedding_store.optimizers.dense_replay.dense_form import DenseForm

__all__ = ["Segments", "segments_of"]


_TOLERANCE = 2e-8  # of the whole sum, that cutting the series may cost: below float32's half unit of 6e-8
_NEGLIGIBLE = 1e-12  # of the whole sum, that the steps beyond `reach` may add
_NEGLIGIBLE_SHARE = 1e-9  # of epsilon
_LARGEST_ROOT = 1e3  # of divisors, where their ratio to epsilon decides how long steps matter
_DEGREES = (0, 3, 7)


@dataclass(frozen=True, slots=True)
class Segments:
    """The pieces of a sum over missed steps.

    Attributes:
        starts: int64 `[s]`: segment i holds the steps k with starts[i] < k <= starts[i + 1], the last one all others.
        centres: float64 `[s]`: c of each.
        degree: Of the polynomials, one of 0, 3, 7.
        reach: Steps after which nothing moves any more.
    """

    starts: npt.NDArray[np.int64]
    centres: Float64
    degree: int
    reach: int


def segments_of(form: DenseForm) -> Segments:
    """The cheapest pieces that are exact enough for an optimizer's dense form."""
    if form.moving < 0:
        return _segments(0.0, 1.0, 1.0)
    return _segments(form.factors[form.moving], form.shrink, form.epsilon)


@lru_cache(maxsize=64)
def _segments(b: float, r: float, epsilon: float) -> Segments:
    reach = _reach(b, r, epsilon)
    if r == 1 or b == 0:
        return Segments(np.zeros(1, np.int64), np.ones(1), 0, reach)
    # From there on epsilon alone divides, whatever the divisor was: all these steps are one piece.
    floor = math.log(_NEGLIGIBLE_SHARE * epsilon / _LARGEST_ROOT) / math.log(r)
    steps: Float64 = np.arange(1.0, min(reach, math.ceil(floor)) + 1)
    sizes: Float64 = np.exp(
        np.minimum(math.log(b / r), 0.0) * (steps - 1)
    )  # of the steps, at most; the first one's is 1
    plans = [Segments(*_cut(sizes, np.power(r, steps), degree), degree, reach) for degree in _DEGREES[1:]]
    return min(plans, key=lambda plan: len(plan.starts) * (plan.degree + 10))  # a division and a root weigh as much


def _reach(b: float, r: float, epsilon: float) -> int:
    """Steps after which the others add less than what counts, whatever the divisor."""
    if b == 0:
        return 1
    lean = b / r
    # Either the steps get smaller even where epsilon does not matter, or epsilon bounds them in the end.
    bounds = [math.log(_NEGLIGIBLE * (1 - lean)) / math.log(lean)] if lean < 1 else []
    if epsilon > 0:
        bounds.append(math.log(_NEGLIGIBLE * (1 - b) * epsilon / _LARGEST_ROOT) / math.log(b))
    return 1 + math.ceil(min(bounds))


def _cut(sizes: Float64, powers: Float64, degree: int) -> tuple[npt.NDArray[np.int64], Float64]:
    """Starts and centres: each segment as long as its series may be cut after `degree`."""
    sums = np.cumsum(sizes)
    starts, centres, begin = [], [], 0
    while begin < len(sizes):
        low, high = begin + 1, len(sizes)
        while low < high:  # the longest that is good enough
            end = (low + high + 1) // 2
            segment = slice(begin, end)
            good = _error(sizes[segment], powers[segment], sums[segment], degree) <= _TOLERANCE
            low, high = (end, high) if good else (low, end - 1)
        starts.append(begin)
        centres.append(_centre(sizes[begin:low], powers[begin:low]))
        begin = low
    return np.array(starts, np.int64), np.array(centres)


def _centre(sizes: Float64, powers: Float64) -> float:
    return float(np.average(powers, weights=sizes))


def _error(sizes: Float64, powers: Float64, sums: Float64, degree: int) -> float:
    """What cutting a segment's series costs at most, wherever the sum ends, as a share of it."""
    away = np.abs(powers / _centre(sizes, powers) - 1.0)
    return float(np.max(np.cumsum(sizes * away ** (degree + 1)) / sums))
