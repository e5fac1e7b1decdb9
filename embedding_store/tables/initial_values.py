"""Initial values of rows: a pure function of (seed, table name, id, column).

Bits come from Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the key is the
BLAKE2b digest of seed and table name, the counter is (id, block of four columns), one word a column; ids and columns
are those of the whole table, where the table is a shard. Normal values are the inverse distribution function by
algorithm AS 241 (Wichura 1988), in additions, multiplications, divisions and square roots alone, which IEEE 754 fixes
to the bit: no value depends on a machine's math library, on the batch, on the order or on threads.
"""

import hashlib
import math
from functools import lru_cache

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import INITIALIZER_KINDS, ShardOrigin, TableSpec
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.number_formats import HALF_DTYPES, round_half

_CONSTANT, _UNIFORM, _NORMAL, _TRUNCATED_NORMAL = range(4)
_SHARE_BELOW = 0.02275013194817921  # of a normal distribution, below -2 standard deviations


def initial_rows(spec: TableSpec, ids: Int64, out: Float32 | None = None) -> Float32:
    """The rows that `ids` read before they are ever updated.

    Args:
        spec: The table; its name, seed, dim, initializer and origin count (a shard's rows are the whole table's, cut to
            its ids and columns), and a float16 or bfloat16 dtype, to which values are rounded.
        ids: int64 `[n]`, any values, duplicates allowed.
        out: float32 `[n, dim]`, C-contiguous, to write into; made if None.

    Returns:
        float32 `[n, dim]`.
    """
    if out is None:
        out = np.empty((len(ids), spec.dim), np.float32)
    write_initial_rows(spec, ids, np.arange(len(ids), dtype=np.int64), out)
    return out


def write_initial_rows(spec: TableSpec, ids: Int64, rows: Int64, out: Float32) -> None:
    """Writes the initial row of `ids[k]` into `out[rows[k]]`.

    Args:
        spec: The table.
        ids: int64 `[m]`.
        rows: int64 `[m]`, rows of `out`.
        out: float32 `[n, dim]`, C-contiguous; other rows are left alone.
    """
    kind, a, b = _distribution(spec)
    if kind == _CONSTANT:
        out[rows] = np.float32(a)
    else:
        key = table_key(spec.seed, spec.name)
        _fill(out, whole_ids(spec.origin, ids), rows, spec.origin.first_column, *key, kind, a, b)
    if spec.dtype in HALF_DTYPES:
        round_half(HALF_DTYPES[spec.dtype], out, rows)


def whole_ids(origin: ShardOrigin, ids: Int64) -> Int64:
    """The ids int64 `[n]`, C-contiguous, that a shard's ids have in the whole table."""
    if origin.id_stride == 1:
        return np.ascontiguousarray(ids)
    whole: Int64 = ids * np.int64(origin.id_stride) + np.int64(origin.id_offset)
    return whole


@lru_cache(maxsize=4096)
def table_key(seed: int, name: str, purpose: bytes = b"") -> tuple[np.uint64, np.uint64]:
    """The two 32-bit words of a table's Philox key.

    They are the first 8 bytes, little-endian, of BLAKE2b-64 over the seed as 8 little-endian bytes (two's complement)
    and the name in UTF-8, personalised by a purpose of up to 16 bytes.
    """
    words = seed.to_bytes(8, "little", signed=True) + name.encode()
    digest = hashlib.blake2b(words, digest_size=8, person=purpose).digest()
    return np.uint64(int.from_bytes(digest[:4], "little")), np.uint64(int.from_bytes(digest[4:], "little"))


def _distribution(spec: TableSpec) -> tuple[int, float, float]:
    initializer = spec.initializer
    match initializer.kind:
        case "zeros":
            return _CONSTANT, 0.0, 0.0
        case "ones":
            return _CONSTANT, 1.0, 0.0
        case "constant":
            return _CONSTANT, initializer.a, 0.0
        case "uniform":
            return _UNIFORM, initializer.a, initializer.b
        case "normal":
            return _NORMAL, initializer.a, initializer.b
        case "truncated_normal":
            return _TRUNCATED_NORMAL, initializer.a, initializer.b
    raise AssertionError(f"no initial values for kind {initializer.kind!r} of {INITIALIZER_KINDS}")


_WORD, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


@kernel
def philox_round(
    c0: np.uint64, c1: np.uint64, c2: np.uint64, c3: np.uint64, k0: np.uint64, k1: np.uint64, turn: int
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """One of the ten rounds of Philox4x32, of a counter's words `c` and a key's words `k`."""
    p0, p1 = _M0 * c0, _M1 * c2
    key0 = (k0 + np.uint64(turn) * _W0) & _WORD
    key1 = (k1 + np.uint64(turn) * _W1) & _WORD
    return (p1 >> _SHIFT) ^ c1 ^ key0, p1 & _WORD, (p0 >> _SHIFT) ^ c3 ^ key1, p0 & _WORD


@kernel
def _philox(
    c0: np.uint64, c1: np.uint64, c2: np.uint64, c3: np.uint64, k0: np.uint64, k1: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """Philox4x32-10; every argument and result is a 32-bit word in 64 bits."""
    for turn in range(10):
        c0, c1, c2, c3 = philox_round(c0, c1, c2, c3, k0, k1, turn)
    return c0, c1, c2, c3


@kernel
def _logarithm(x: float) -> float:
    """Natural logarithm of x > 0 by its atanh series, within 2 ulp of exact."""
    fraction, exponent = math.frexp(x)
    if fraction < 0.7071067811865476:
        fraction *= 2.0
        exponent -= 1
    f = (fraction - 1.0) / (fraction + 1.0)
    s = f * f
    series = 1.0 / 21.0
    for odd in (19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0):
        series = series * s + 1.0 / odd
    return exponent * 0.6931471805599453 + 2.0 * f * series


@kernel
def _normal_centre(q: float) -> float:
    """AS 241, |p - 0.5| <= 0.425, from q = p - 0.5."""
    r = 0.180625 - q * q
    above = 2509.0809287301226727 * r + 33430.575583588128105
    above = (above * r + 67265.770927008700853) * r + 45921.953931549871457
    above = (above * r + 13731.693765509461125) * r + 1971.5909503065514427
    above = (above * r + 133.14166789178437745) * r + 3.387132872796366608
    below = 5226.495278852854561 * r + 28729.085735721942674
    below = (below * r + 39307.89580009271061) * r + 21213.794301586595867
    below = (below * r + 5394.1960214247511077) * r + 687.1870074920579083
    below = (below * r + 42.313330701600911252) * r + 1.0
    return q * above / below


@kernel
def _normal_tail(p: float) -> float:
    """AS 241, from p < 0.075, the probability beyond; the result is positive."""
    r = math.sqrt(-_logarithm(p))
    if r <= 5.0:
        r -= 1.6
        above = 7.7454501427834140764e-4 * r + 0.0227238449892691845833
        above = (above * r + 0.24178072517745061177) * r + 1.27045825245236838258
        above = (above * r + 3.64784832476320460504) * r + 5.7694972214606914055
        above = (above * r + 4.6303378461565452959) * r + 1.42343711074968357734
        below = 1.05075007164441684324e-9 * r + 5.475938084995344946e-4
        below = (below * r + 0.0151986665636164571966) * r + 0.14810397642748007459
        below = (below * r + 0.68976733498510000455) * r + 1.6763848301838038494
        below = (below * r + 2.05319162663775882187) * r + 1.0
        return above / below
    r -= 5.0
    above = 2.01033439929228813265e-7 * r + 2.71155556874348757815e-5
    above = (above * r + 0.0012426609473880784386) * r + 0.026532189526576123093
    above = (above * r + 0.29656057182850489123) * r + 1.7848265399172913358
    above = (above * r + 5.4637849111641143699) * r + 6.6579046435011037772
    below = 2.04426310338993978564e-15 * r + 1.4215117583164458887e-7
    below = (below * r + 1.8463183175100546818e-5) * r + 7.868691311456132591e-4
    below = (below * r + 0.0148753612908506148525) * r + 0.13692988092273580531
    below = (below * r + 0.59983220655588793769) * r + 1.0
    return above / below


@kernel
def _standard_normal(p: float) -> float:
    """The value below which a share 0 < p < 1 of a standard normal lies."""
    q = p - 0.5
    if abs(q) <= 0.425:
        return _normal_centre(q)
    if q < 0.0:
        return -_normal_tail(p)
    return _normal_tail(1.0 - p)


@kernel
def _value(word: np.uint64, kind: int, a: float, b: float) -> np.float32:
    """One initial value from 32 random bits."""
    if kind == _UNIFORM:
        # 24 bits, which float32 holds exactly: low + (high - low) * [0, 1)
        share = np.float32(np.int64(word >> np.uint64(8))) * np.float32(2.0**-24)
        return np.float32(a) + np.float32(b - a) * share
    p = (np.float64(np.int64(word)) + 0.5) * 2.0**-32
    if kind == _TRUNCATED_NORMAL:
        p = _SHARE_BELOW + p * (1.0 - 2.0 * _SHARE_BELOW)
    return np.float32(a + b * _standard_normal(p))


@kernel
def _fill(
    out: Float32, ids: Int64, rows: Int64, first: int, k0: np.uint64, k1: np.uint64, kind: int, a: float, b: float
) -> None:
    """Columns `first..first + dim` of the whole table's rows; its blocks of four begin at multiples of four."""
    dim = out.shape[1]
    for k in range(len(ids)):
        row = out[rows[k]]
        c0 = np.uint64(ids[k]) & _WORD
        c1 = np.uint64(ids[k]) >> _SHIFT
        for block in range(first >> 2, (first + dim + 3) >> 2):
            w0, w1, w2, w3 = _philox(c0, c1, np.uint64(block), np.uint64(0), k0, k1)
            column = (block << 2) - first
            if column >= 0:
                row[column] = _value(w0, kind, a, b)
            if 0 <= column + 1 < dim:
                row[column + 1] = _value(w1, kind, a, b)
            if 0 <= column + 2 < dim:
                row[column + 2] = _value(w2, kind, a, b)
            if 0 <= column + 3 < dim:
                row[column + 3] = _value(w3, kind, a, b)
