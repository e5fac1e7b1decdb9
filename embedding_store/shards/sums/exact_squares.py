"""Sums of squares without rounding: the same number however the values are ordered, and whoever holds which of them.

The square of a float32 is an integer of 48 bits times a power of two, and at least 2**-298. Squares of one power are
counted together, so that a sum is a few hundred integers, and then one of any size. A norm taken of it is rounded once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.native.kernel import kernel

__all__ = ["UNIT", "exact_squares", "square_of"]

UNIT = 2.0**-298
"""What an exact sum of squares is a multiple of: the square of the smallest float32."""

_UNITS_IN_ONE = 2**298
_POWERS = 254  # exponents of finite float32 values
_LOW_BITS = 24
_PIECE = 1 << 32  # values whose halves of 24 bits an uint64 has room for


def exact_squares(values: Float32) -> int | None:
    """The sum of all squares, as a multiple of `UNIT`; None: a value is NaN or infinite.

    Args:
        values: float32 of any shape.
    """
    flat = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
    total = 0
    for start in range(0, len(flat), _PIECE):
        counts = np.zeros((_POWERS, 2), np.uint64)
        if not _count(flat[start : start + _PIECE], counts):
            return None
        for power in np.flatnonzero(counts.any(axis=1)):
            low, high = (int(count) for count in counts[power])
            total += (low + (high << _LOW_BITS)) << (2 * int(power))
    return total


def square_of(total: int) -> float:
    """The number that an exact sum stands for, rounded once."""
    return total / _UNITS_IN_ONE  # of two integers: Python rounds correctly, whatever their size


@kernel
def _count(bits: npt.NDArray[np.uint32], counts: npt.NDArray[np.uint64]) -> bool:
    """Adds the squares of values, given as their bits, to those of their power; False: one is not finite."""
    for i in range(len(bits)):
        exponent = (bits[i] >> np.uint32(23)) & np.uint32(255)
        if exponent == np.uint32(255):
            return False
        digits = np.uint64(bits[i] & np.uint32(0x7FFFFF))
        power = np.int64(0)
        if exponent > np.uint32(0):
            digits |= np.uint64(0x800000)
            power = np.int64(exponent) - 1
        square = digits * digits
        counts[power, 0] += square & np.uint64(0xFFFFFF)
        counts[power, 1] += square >> np.uint64(24)
    return True
