"""Kernels that split ids and rows by id, and put them together again."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.row_moves import copy_row

__all__ = ["cut_columns", "gather_rows", "global_ids", "split_ids"]

_BELOW_32_BITS = 1 << 31


def split_ids(ids: Int64, shards: int) -> tuple[Int64, Int64, list[int]]:
    """Ids sorted by shard, in their order within each.

    Args:
        ids: int64 `[n]`, C-contiguous.
        shards: n; id i is id `i // n` of shard `i mod n`.

    Returns:
        local: int64 `[n]`, the shards' own ids, shard after shard.
        places: int64 `[n]`, the position of each in `ids`.
        ends: Where in both each shard's ids end.
    """
    local, places = np.empty_like(ids), np.empty_like(ids)
    ends = np.zeros(shards, np.int64)
    bits = shards.bit_length() - 1 if shards & (shards - 1) == 0 else -1
    _split(ids, shards, bits, np.empty(len(ids), np.int32), np.empty_like(ids), local, places, ends)
    return local, places, ends.tolist()


def global_ids(ids: Int64, shards: int, shard: int) -> Int64:
    """The ids of the whole table that `ids` int64 `[n]` of one shard are."""
    return ids * np.int64(shards) + np.int64(shard)


def cut_columns(rows: Float32, columns: slice) -> Float32:
    """A contiguous copy of `rows[:, columns]`, made without holding the GIL; `rows` itself if that is all of it."""
    part = rows[:, columns]
    if part.flags.c_contiguous:
        return part
    out = np.empty(part.shape, np.float32)
    _copy(part, out)
    return out


def gather_rows(rows: Float32, places: Int64) -> Float32:
    """`rows[places]`, float32 `[m, columns]`, without holding the GIL."""
    out = np.empty((len(places), rows.shape[1]), np.float32)
    _gather(rows, places, out)
    return out


@kernel
def _split(
    ids: Int64, shards: int, bits: int, shard_of: npt.NDArray[np.int32], quotients: Int64, local: Int64,
    places: Int64, ends: Int64,
) -> None:  # fmt: skip
    """A counting sort; `bits` is the logarithm of `shards` where that is a power of two, else -1."""
    for i in range(len(ids)):
        if bits >= 0:
            # Shift and mask are floor division and modulo, for negative ids too.
            quotient = ids[i] >> bits
        elif 0 <= ids[i] < _BELOW_32_BITS:
            quotient = np.int64(np.uint32(ids[i]) // np.uint32(shards))  # of 32 bits: a third of the time
        else:
            quotient = ids[i] // shards
        shard = ids[i] - quotient * shards
        quotients[i] = quotient
        shard_of[i] = shard
        ends[shard] += 1
    start = 0
    for shard in range(shards):
        count = ends[shard]
        ends[shard] = start
        start += count
    for i in range(len(ids)):
        at = ends[shard_of[i]]
        local[at] = quotients[i]
        places[at] = i
        ends[shard_of[i]] = at + 1


@kernel
def _copy(rows: Float32, out: Float32) -> None:
    for i in range(len(rows)):
        copy_row(out, i, rows, i)


@kernel
def _gather(rows: Float32, places: Int64, out: Float32) -> None:
    for i in range(len(places)):
        copy_row(out, i, rows, places[i])
