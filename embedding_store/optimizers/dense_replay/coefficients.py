"""The scalars that catch a row up, by the step up to which it has been: computed once for all rows of that step.

In double precision. With s_t the scale of step t, e_t = 1 - decay * rate its
decay, b and r as in `segments`, and q_i = b r^i, the power sums

    P_i(c) = sum over t >= c of s_t q_i^(t - c + 1) / (e_c ... e_t)

obey P_i(c) = (q_i / e_c)(s_c + P_i(c + 1)), so that each new step costs a pass
over the `reach` newest ones. Every sum over a segment of missed steps is a
difference of two of them, and every moment around a segment's centre a few
of those: no sum over missed steps is ever run through again.
"""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Float64, Int64, UInt8
from elastable.embedding_store.native.kernel import kernel, stores_in_order

__all__ = ["power_sums", "write_coefficients"]


@kernel
def power_sums(scales: Float64, gains: Float64, ratios: Float64, sums: Float64, oldest: int, end: int) -> None:
    """Writes `sums[i, c]`, P_i of step c, for the steps `oldest` to `end`, as if no step came after these.

    Args:
        scales: float64 `[steps]`, s_t.
        gains: float64 `[steps]`, 1 / e_t.
        ratios: float64 `[degree + 1]`, q_i.
        sums: float64 `[degree + 1, steps + 1]`.
        oldest: The first step whose sum is wanted.
        end: The steps taken; there is nothing to sum from here on.
    """
    for i in range(len(ratios)):
        total = 0.0
        sums[i, end] = total
        for c in range(end - 1, oldest - 1, -1):
            total = ratios[i] * gains[c] * (scales[c] + total)
            sums[i, c] = total


@kernel
def _moments(
    sums: Float64, logs: Float64, ratios: Float64, c: int, begin: int, end: int, centre: float, out: Float64
) -> None:
    """The moments of steps c + begin to c + end - 1 around a centre, into `out` float64 `[degree + 1]`."""
    shrink = ratios[1] / ratios[0] if len(ratios) > 1 else 1.0
    before = np.exp(logs[c] - logs[c + begin]) * ratios[0] ** begin
    after = np.exp(logs[c] - logs[c + end]) * ratios[0] ** end
    first, last = shrink**begin / centre, shrink**end / centre
    for i in range(len(ratios)):
        out[i] = before * sums[i, c + begin] - after * sums[i, c + end]
        before, after = before * first, after * last
    for j in range(1, len(ratios)):  # differences of neighbours, j times over: sums of (r^k / c - 1)^j
        for i in range(len(ratios) - 1, j - 1, -1):
            out[i] -= out[i - 1]


@kernel
def write_coefficients(
    sums: Float64,
    logs: Float64,
    ratios: Float64,
    factors: Float64,
    starts: Int64,
    centres: Float64,
    wanted: Int64,
    at: int,
    out: Float32,
    known: UInt8,
    above: int,
) -> None:
    """Writes what rows caught up to the steps `wanted` need to be caught up to step `at`.

    A row of `out` holds what the weights are multiplied by, what each slot is
    multiplied by, and for each segment its centre and its coefficients.

    Args:
        sums, ratios: As of `power_sums`, `at` being the last step.
        logs: float64 `[steps + 1]`: the logarithm of e_0 ... e_(t - 1).
        factors: float64 `[slots]`.
        starts, centres: As of `Segments`.
        wanted: int64 `[n]`, steps below `at`.
        at: The step to catch up to.
        out: float32 `[rows, columns]`: row `above + c` is of step c.
        known: uint8 `[rows]`, set once a row is written, for whoever reads meanwhile.
    """
    moments = np.empty(len(ratios), np.float64)
    for w in range(len(wanted)):
        c = wanted[w]
        row, missed = out[c + above], at - c
        kept = np.exp(logs[at] - logs[c])
        row[0] = kept
        for k in range(len(factors)):
            row[1 + k] = factors[k] ** missed
        column = 1 + len(factors)
        for s in range(len(starts)):
            begin = min(starts[s], missed)
            end = min(starts[s + 1], missed) if s + 1 < len(starts) else missed
            row[column] = centres[s]
            _moments(sums, logs, ratios, c, begin, end, centres[s], moments)
            for j in range(len(ratios)):
                row[column + 1 + j] = kept * moments[j]
            column += 1 + len(ratios)
    stores_in_order()
    for w in range(len(wanted)):
        known[wanted[w] + above] = 1
