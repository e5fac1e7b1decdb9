"""The bits that rows are rounded by: a pure function of (seed, table name, id, column, step).

Philox4x32-10, as for initial values (`embedding_store.initial_values`), with a
key of its own: the BLAKE2b digest of seed and table name under the
personalisation "rounding". The counter is (id, block of eight columns, step),
16 bits a column; ids and columns are those of the whole table, where the table
is a shard. So a row is rounded alike whatever thread, shard or backend holds it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from embedding_store.half_numbers import UInt16
from embedding_store.initial_values import philox_key, whole_ids
from embedding_store.kernel import kernel
from embedding_store.spec import TableSpec
from embedding_store.store import Int64

__all__ = ["rounding_bits", "rounding_key"]

_BLOCK = 8  # columns that one call of Philox serves
_Words = npt.NDArray[np.uint32]


def rounding_bits(spec: TableSpec, ids: Int64, step: int) -> UInt16:
    """Random bits, one uint16 for each value of some rows.

    Args:
        spec: The table; its name, seed, dim and origin count.
        ids: int64 `[n]`.
        step: Optimizer steps taken before; the next 2**32 steps differ.

    Returns:
        uint16 `[n, dim]`, rows C-contiguous.
    """
    first = spec.origin.first_column
    start = first // _BLOCK
    blocks = -(-(first + spec.dim) // _BLOCK) - start
    counters = np.empty((3, len(ids) * blocks), np.uint32)
    _count(whole_ids(spec.origin, ids), start, blocks, counters)
    words = np.empty(4 * counters.shape[1], np.uint32)
    _philox(counters, np.uint64(step & 0xFFFFFFFF), *rounding_key(spec.seed, spec.name), words)
    # Words are little-endian everywhere: the lower half is the earlier column.
    bits: UInt16 = words.astype("<u4", copy=False).view("<u2").reshape(len(ids), blocks * _BLOCK)
    skipped = first - start * _BLOCK
    return bits[:, skipped : skipped + spec.dim]


@lru_cache(maxsize=4096)
def rounding_key(seed: int, name: str) -> tuple[np.uint64, np.uint64]:
    """The two 32-bit words of a table's Philox key for rounding."""
    return philox_key(seed, name, b"rounding")


@kernel
def _count(ids: Int64, start: int, blocks: int, counters: _Words) -> None:
    """The counters of every block of every row: id, low and high, and block."""
    for i in range(len(ids)):
        low, high = np.uint32(ids[i] & 0xFFFFFFFF), np.uint32((ids[i] >> 32) & 0xFFFFFFFF)
        for block in range(blocks):
            at = i * blocks + block
            counters[0, at] = low
            counters[1, at] = high
            counters[2, at] = np.uint32(start + block)


_WORD = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


@kernel
def _round(
    c0: np.uint64, c1: np.uint64, c2: np.uint64, c3: np.uint64, k0: np.uint64, k1: np.uint64, turn: int
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    p0 = _M0 * c0
    p1 = _M1 * c2
    key0 = (k0 + np.uint64(turn) * _W0) & _WORD
    key1 = (k1 + np.uint64(turn) * _W1) & _WORD
    return (p1 >> _SHIFT) ^ c1 ^ key0, p1 & _WORD, (p0 >> _SHIFT) ^ c3 ^ key1, p0 & _WORD


@kernel
def _philox(counters: _Words, step: np.uint64, k0: np.uint64, k1: np.uint64, words: _Words) -> None:
    """Ten rounds, written out: as an inner loop they would keep the outer one from being vectorised."""
    for i in range(counters.shape[1]):
        a, b, c, d = np.uint64(counters[0, i]), np.uint64(counters[1, i]), np.uint64(counters[2, i]), step
        a, b, c, d = _round(a, b, c, d, k0, k1, 0)
        a, b, c, d = _round(a, b, c, d, k0, k1, 1)
        a, b, c, d = _round(a, b, c, d, k0, k1, 2)
        a, b, c, d = _round(a, b, c, d, k0, k1, 3)
        a, b, c, d = _round(a, b, c, d, k0, k1, 4)
        a, b, c, d = _round(a, b, c, d, k0, k1, 5)
        a, b, c, d = _round(a, b, c, d, k0, k1, 6)
        a, b, c, d = _round(a, b, c, d, k0, k1, 7)
        a, b, c, d = _round(a, b, c, d, k0, k1, 8)
        a, b, c, d = _round(a, b, c, d, k0, k1, 9)
        words[4 * i] = a
        words[4 * i + 1] = b
        words[4 * i + 2] = c
        words[4 * i + 3] = d
