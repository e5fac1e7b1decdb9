"""Numbers of 16 bits: float16 and bfloat16, to and from float32, as kernels over uint16.

Neither numba nor numpy knows bfloat16, and numba has no float16, so their bits are made by integer arithmetic, the same
on every machine. Nearest rounding is to even on ties; NaN stays NaN. Random rounding goes up with the probability of
the part that is cut off, so that its expectation is the number itself: exactly so for bfloat16 and for float16 from
2**-14 on, within 2**-16 of a step below. Where it would go up to infinity, rounding is to nearest.
"""

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.native.intrinsics import bits_of, float_of
from elastable.embedding_store.native.kernel import inlined, kernel, prefetch

UInt16 = npt.NDArray[np.uint16]

_BFLOAT16, _FLOAT16 = 0, 1
HALF_DTYPES = {"bfloat16": _BFLOAT16, "float16": _FLOAT16}
"""Dtype name -> how the kernels here call it."""

_AHEAD = 32


def gather_half(kind: int, rows: UInt16, positions: Int64, out: Float32) -> None:
    """out[i] = rows[positions[i]], exactly; rows of `out` at negative positions are left alone.

    Args:
        kind: A value of `HALF_DTYPES`.
        rows: uint16 `[rows, dim]`: the numbers' bits.
        positions: int64 `[n]`.
        out: float32 `[n, dim]`; rows may lie apart, columns may not.
    """
    _gather(kind, rows, positions, with_gaps(out))


def scatter_half(kind: int, values: Float32, bits: UInt16 | None, rows: UInt16, positions: Int64) -> None:
    """rows[positions[i]] = values[i], rounded.

    Args:
        kind: A value of `HALF_DTYPES`.
        values: float32 `[n, dim]`.
        bits: uint16 `[n, dim]` random bits to round by (`elastable.embedding_store.tables.row_dtypes`);
            None: to nearest.
        rows: uint16 `[rows, dim]`.
        positions: int64 `[n]`, each once.
    """
    if bits is None:
        _scatter_nearest(kind, values, rows, positions)
    else:
        _scatter_randomly(kind, values, bits, rows, positions)


_SIGN, _MAGNITUDE = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_QUIET_BFLOAT, _LARGEST_BFLOAT = np.uint32(0x40), np.uint32(0x7F7F0000)
_LEAST_NORMAL_HALF = np.uint32(0x38800000)  # 2**-14
_LARGEST_HALF = np.uint32(0x477FE000)  # 65504
_BEYOND_HALF = np.uint32(0x477FF000)  # 65520, the first number nearer to infinity
_BIAS = np.uint32(112 << 23)  # between the exponents of float32 and float16


@kernel
def _from_bfloat(number: np.uint16) -> np.float32:
    value: np.float32 = float_of(np.uint32(np.uint32(number) << np.uint32(16)))
    return value


@kernel
def _from_half(number: np.uint16) -> np.float32:
    sign = np.uint32((np.uint32(number) & np.uint32(0x8000)) << np.uint32(16))
    shifted = np.uint32((np.uint32(number) & np.uint32(0x7FFF)) << np.uint32(13))
    exponent = np.uint32(shifted & np.uint32(0x0F800000))
    normal = np.uint32(shifted + _BIAS)
    # Subnormals by a subtraction of normal numbers: threads of TensorFlow flush subnormal float32 to zero.
    small = bits_of(float_of(np.uint32(shifted + np.uint32(113 << 23))) - np.float32(2.0**-14))
    large = np.uint32(normal + _BIAS)  # infinity and NaN
    bits = small if exponent == 0 else (large if exponent == np.uint32(0x0F800000) else normal)
    value: np.float32 = float_of(np.uint32(bits | sign))
    return value


@kernel
def _to_bfloat(value: np.float32) -> np.uint16:
    bits = bits_of(value)
    odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
    nan = np.uint32(np.uint32(bits >> np.uint32(16)) | _QUIET_BFLOAT)
    return np.uint16(nan if np.uint32(bits & _MAGNITUDE) > _INFINITY else rounded)


@kernel
def _to_bfloat_randomly(value: np.float32, random: np.uint16) -> np.uint16:
    bits = bits_of(value)
    if np.uint32(bits & _MAGNITUDE) >= _LARGEST_BFLOAT:
        return _to_bfloat(value)
    return np.uint16(np.uint32(bits + np.uint32(random)) >> np.uint32(16))


@kernel
def _to_half(value: np.float32) -> np.uint16:
    bits = bits_of(value)
    size = np.uint32(bits & _MAGNITUDE)
    odd = np.uint32((size >> np.uint32(13)) & np.uint32(1))
    normal = np.uint32(np.uint32(size - _BIAS + np.uint32(0x0FFF) + odd) >> np.uint32(13))
    # A step of float32 at 0.5 is one of subnormal halves: the addition rounds.
    small = np.uint32(bits_of(float_of(size) + np.float32(0.5)) - np.uint32(0x3F000000))
    large = np.uint32(0x7E00) if size > _INFINITY else np.uint32(0x7C00)
    half = small if size < _LEAST_NORMAL_HALF else (large if size >= _BEYOND_HALF else normal)
    return np.uint16(half | np.uint32((bits & _SIGN) >> np.uint32(16)))


@kernel
def _to_half_randomly(value: np.float32, random: np.uint16) -> np.uint16:
    bits = bits_of(value)
    size = np.uint32(bits & _MAGNITUDE)
    if size >= _LARGEST_HALF:
        return _to_half(value)
    normal = np.uint32(np.uint32(size - _BIAS + np.uint32(random >> np.uint16(3))) >> np.uint32(13))
    # In steps of 2**-24, of which a subnormal half counts whole ones.
    steps = (float_of(size) if size < _LEAST_NORMAL_HALF else np.float32(0)) * np.float32(2.0**24)
    whole = np.uint32(np.int32(steps))
    share = np.int32((steps - np.float32(np.int32(whole))) * np.float32(65536))
    small = np.uint32(whole + np.uint32(1 if np.int32(random) < share else 0))
    half = small if size < _LEAST_NORMAL_HALF else normal
    return np.uint16(half | np.uint32((bits & _SIGN) >> np.uint32(16)))


@kernel
def _gather(kind: int, rows: UInt16, positions: Int64, out: Float32) -> None:
    count, dim = len(positions), rows.shape[1]
    for i in range(count):
        prefetch(rows, positions[min(i + _AHEAD, count - 1)])
        p = positions[i]
        if p >= 0:
            if kind == _BFLOAT16:
                for j in range(dim):
                    out[i, j] = _from_bfloat(rows[p, j])
            else:
                for j in range(dim):
                    out[i, j] = _from_half(rows[p, j])


@kernel
def _scatter_nearest(kind: int, values: Float32, rows: UInt16, positions: Int64) -> None:
    count, dim = values.shape
    for i in range(count):
        p = positions[i]
        if kind == _BFLOAT16:
            for j in range(dim):
                rows[p, j] = _to_bfloat(values[i, j])
        else:
            for j in range(dim):
                rows[p, j] = _to_half(values[i, j])


@kernel
def _scatter_randomly(kind: int, values: Float32, bits: UInt16, rows: UInt16, positions: Int64) -> None:
    count, dim = values.shape
    for i in range(count):
        p = positions[i]
        if kind == _BFLOAT16:
            for j in range(dim):
                rows[p, j] = _to_bfloat_randomly(values[i, j], bits[i, j])
        else:
            for j in range(dim):
                rows[p, j] = _to_half_randomly(values[i, j], bits[i, j])


@kernel
def round_half(kind: int, values: Float32, positions: Int64) -> None:
    """Rounds the rows of `values` float32 `[rows, dim]` at `positions` int64 `[n]` to nearest, in place."""
    dim = values.shape[1]
    for p in positions:
        if kind == _BFLOAT16:
            for j in range(dim):
                values[p, j] = _from_bfloat(_to_bfloat(values[p, j]))
        else:
            for j in range(dim):
                values[p, j] = _from_half(_to_half(values[p, j]))


@kernel
def round_half_randomly(kind: int, values: Float32, bits: UInt16) -> None:
    """Rounds `values` float32 `[n, dim]` by random `bits` uint16 `[n, dim]`, in place."""
    count, dim = values.shape
    for i in range(count):
        if kind == _BFLOAT16:
            for j in range(dim):
                values[i, j] = _from_bfloat(_to_bfloat_randomly(values[i, j], bits[i, j]))
        else:
            for j in range(dim):
                values[i, j] = _from_half(_to_half_randomly(values[i, j], bits[i, j]))


# Rows that are some columns of a wider buffer, as kernels are fast on them


def with_gaps(rows: Float32) -> Float32:
    """Rows float32 `[n, dim]` with what lies between them, as C-contiguous `[n, at least dim]`.

    For kernels that write the first dim columns alone: numba vectorises loops over C-contiguous arrays only. Columns
    must lie side by side; what does not is handed back as it is. Beyond the last row's dim there may be no memory.
    """
    row, column = rows.strides
    if rows.flags.c_contiguous or column != rows.itemsize or row % column or row < column * rows.shape[1]:
        return rows
    return np.lib.stride_tricks.as_strided(rows, (len(rows), row // column), (row, column))


@inlined
def mixed_bits(word: np.uint64) -> np.uint64:
    """The finalizer of splitmix64 (Steele, Lea, Flood: OOPSLA 2014)."""
    h = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))
