"""Kernels that lay out rows for an exchange and reassemble them, without holding the GIL."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.row_moves import copy_row

__all__ = ["join_columns", "lay_rows", "own_ids", "spread_columns"]

_BELOW_32_BITS = 1 << 31


def own_ids(ids: Int64, shards: int, shard: int) -> tuple[Int64, Int64]:
    """The ids (int64 `[n]`, not negative) with `id mod shards = shard`, in order.

    Returns:
        int64 `[m]`: `id // shards`; int64 `[m]`: their positions in `ids`.
    """
    local, places = np.empty_like(ids), np.empty_like(ids)
    bits = shards.bit_length() - 1 if shards & (shards - 1) == 0 else -1
    count = _own(ids, shards, bits, shard, local, places)
    return local[:count], places[:count]


def lay_rows(rows: Float32, places: Int64, out: Float32) -> None:
    """`out[places] = rows`, float32 `[m, dim]` into `[n, dim]`, C-contiguous; `places` is trusted."""
    _put(np.ascontiguousarray(rows), places, out)


def join_columns(pieces: Float32, count: int, dim: int) -> Float32:
    """float32 `[count, dim]`: rows from their columns, without the padding.

    Args:
        pieces: float32 `[n, rows, width]`, C-contiguous; `pieces[j]` are columns `j width` to `(j + 1) width`.
        count: Number of rows.
        dim: Number of columns, at most `n width`.
    """
    out = np.empty((count, dim), np.float32)
    _join(pieces, out)
    return out


def spread_columns(rows: Float32, shards: int, longest: int) -> Float32:
    """The inverse: float32 `[count, dim]` as `[shards, longest, ceil(dim / shards)]`, padded with zeros."""
    width = -(-rows.shape[1] // shards)
    full = rows.shape == (longest, shards * width)
    pieces: Float32 = (np.empty if full else np.zeros)((shards, longest, width), np.float32)
    _spread(np.ascontiguousarray(rows), pieces)
    return pieces


@kernel
def _own(ids: Int64, shards: int, bits: int, shard: int, local: Int64, places: Int64) -> int:
    """Without a branch on the owner; `bits` is the logarithm of `shards` if that is a power of two, else -1."""
    count = 0
    for i in range(len(ids)):
        if bits >= 0:
            quotient = ids[i] >> bits
        elif ids[i] < _BELOW_32_BITS:
            quotient = np.int64(np.uint32(ids[i]) // np.uint32(shards))  # 32 bits: a third of the time
        else:
            quotient = ids[i] // shards
        local[count] = quotient
        places[count] = i
        count += 1 if ids[i] - quotient * shards == shard else 0
    return count


@kernel
def _put(rows: Float32, places: Int64, out: Float32) -> None:
    for i in range(len(places)):
        copy_row(out, places[i], rows, i)


@kernel
def _join(pieces: npt.NDArray[np.float32], out: Float32) -> None:
    count, dim = out.shape
    width = pieces.shape[2]
    for j in range(len(pieces)):
        first = j * width
        last = min(dim, first + width)
        if last - first == width:
            target = out[:, first:last]
            for i in range(count):
                copy_row(target, i, pieces[j], i)
        else:
            for i in range(count):
                for column in range(first, last):
                    out[i, column] = pieces[j, i, column - first]


@kernel
def _spread(rows: Float32, pieces: npt.NDArray[np.float32]) -> None:
    count, dim = rows.shape
    width = pieces.shape[2]
    for j in range(len(pieces)):
        first = j * width
        last = min(dim, first + width)
        if last - first == width:
            source = rows[:, first:last]
            for i in range(count):
                copy_row(pieces[j], i, source, i)
        else:
            for i in range(count):
                for column in range(first, last):
                    pieces[j, i, column - first] = rows[i, column]
