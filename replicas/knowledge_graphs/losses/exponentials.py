"""Exponentials of rows of scores, eight or sixteen at a time: the C library's function takes one.

The polynomial is that of the Cephes library (S. L. Moshier), `expf`: its error is below two units in the last place.
"""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.native.kernel import kernel, summing_kernel

__all__ = ["exponentials", "row_total"]

_LOWEST = np.float32(-87.0)  # its exponential is the last before denormal numbers
_LOG2_E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504088896341), np.float32(0.693359375), np.float32(-2.12194440e-4)
_C0, _C1, _C2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_C3, _C4, _C5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


@kernel
def exponentials(values: Float32, shift: np.float32, out: Float32) -> None:
    """`out[k] = exp(values[k] - shift)`, for values not above `shift`; below e^-87 it is 0. NaN stays NaN."""
    one, half, zero = np.float32(1), np.float32(0.5), np.float32(0)
    for k in range(len(values)):
        x = values[k] - shift
        kept = _LOWEST if x < _LOWEST else x
        power = np.floor(kept * _LOG2_E + half)
        rest = kept - power * _LN2_HIGH
        rest = rest - power * _LN2_LOW
        series = _C0 * rest + _C1
        series = series * rest + _C2
        series = series * rest + _C3
        series = series * rest + _C4
        series = series * rest + _C5
        series = series * (rest * rest) + rest + one
        scale = np.int32((np.int32(power) + 127) << 23).view(np.float32)
        out[k] = zero if x < _LOWEST else series * scale


@summing_kernel
def row_total(values: Float32) -> np.float32:
    """The sum of a row."""
    total = np.float32(0)
    for k in range(len(values)):
        total += values[k]
    return total
