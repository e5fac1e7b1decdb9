"""The bits that rows are rounded by: a pure function of (seed, table name, id, column, step).

Philox4x32-10, as for initial values (`elastable.embedding_store.rows.initial_values`), with a
key of its own: the BLAKE2b digest of seed and table name under the
personalisation "rounding". The counter is (id, block of eight columns, step),
16 bits a column; ids and columns are those of the whole table, where the table
is a shard. So a row is rounded alike whatever thread, shard or backend holds it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt32
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.numbers.half_numbers import UInt16
from elastable.embedding_store.rows.initial_values import philox_key, whole_ids

__all__ = ["rounding_bits", "rounding_key", "rounding_words"]


_BLOCK = 8  # columns that one call of Philox serves


def rounding_bits(spec: TableSpec, ids: Int64, step: int, room: UInt32 | None = None) -> UInt16:
    """Random bits, one uint16 for each value of some rows.

    Args:
        spec: The table; its name, seed, dim and origin count.
        ids: int64 `[n]`.
        step: Optimizer steps taken before; the next 2**32 steps differ.
        room: uint32 `[rounding_words(spec, n)]` or more to work in; made if None.

    Returns:
        uint16 `[n, dim]`, rows C-contiguous; a view of `room`.
    """
    first = spec.origin.first_column
    start, blocks = _blocks(spec)
    words = room if room is not None else np.empty(rounding_words(spec, len(ids)), np.uint32)
    key = rounding_key(spec.seed, spec.name)
    count = len(ids) * blocks
    counters, words = words[: 3 * count].reshape(3, count), words[3 * count : 7 * count]
    _fill(whole_ids(spec.origin, ids), start, blocks, np.uint64(step & 0xFFFFFFFF), *key, counters, words)
    # Words are little-endian everywhere: the lower half is the earlier column.
    halves = words.astype("<u4", copy=False).view("<u2")
    bits: UInt16 = halves.reshape(len(ids), blocks * _BLOCK)
    skipped = first - start * _BLOCK
    return bits[:, skipped : skipped + spec.dim]


def rounding_words(spec: TableSpec, rows: int) -> int:
    """How many uint32 `rounding_bits` works in for so many rows."""
    return 7 * rows * _blocks(spec)[1]


def _blocks(spec: TableSpec) -> tuple[int, int]:
    """The first block of columns that the table has a part of, and how many there are."""
    first = spec.origin.first_column
    start = first // _BLOCK
    return start, -(-(first + spec.dim) // _BLOCK) - start


@lru_cache(maxsize=4096)
def rounding_key(seed: int, name: str) -> tuple[np.uint64, np.uint64]:
    """The two 32-bit words of a table's Philox key for rounding."""
    return philox_key(seed, name, b"rounding")


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
def _fill(
    ids: Int64, start: int, blocks: int, step: np.uint64, k0: np.uint64, k1: np.uint64, counters: UInt32, words: UInt32
) -> None:
    """The counters of every block of every row, but for the step; and the bits that they give, four words each.

    All ten rounds are written out, and counters laid down before: an inner loop
    would keep the outer one from being vectorised.
    """
    for i in range(len(ids)):
        for k in range(blocks):
            at = i * blocks + k
            counters[0, at] = np.uint32(ids[i] & 0xFFFFFFFF)
            counters[1, at] = np.uint32((ids[i] >> 32) & 0xFFFFFFFF)
            counters[2, at] = np.uint32(start + k)
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
