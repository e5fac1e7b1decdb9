"""Rows at positions, or of ids that are marked as present, gathered in one pass over memory."""

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64, UInt64
from elastable.embedding_store.native.intrinsics import copy_row, fence, prefetch_row, stream_row
from elastable.embedding_store.native.kernel import inlined, kernel
from elastable.embedding_store.native.range_pool import WorkCounter, fail_work, join_work, leave_work, next_pieces

_VALUES_AHEAD = 3072  # 12 KiB on their way: half of it is too few, twice as many gains nothing
_VALUES_A_PIECE = 1 << 16  # some 10 us: how much earlier than another a thread may end
_STREAMED_COLUMNS = 128  # rows longer than what is asked for ahead are slower when they are streamed


def rows_ahead(dim: int) -> int:
    """How many rows ahead a row of `dim` values is prefetched."""
    return max(8, min(128, _VALUES_AHEAD // dim))


def can_stream(out: Float32) -> bool:
    """Whether rows of `out` float32 `[n, dim]` gain by being written past the caches: aligned, and not too long."""
    columns = out.shape[1]
    aligned = out.ctypes.data % 16 == 0 and out.strides[0] % 16 == 0 and columns % 4 == 0
    return aligned and columns <= _STREAMED_COLUMNS


_can_stream = inlined(can_stream)  # for kernels: called from outside, it would be compiled for every kind of `out`


def gather(rows: Float32, positions: Int64, out: Float32, stream: bool) -> int:
    """out[i] = rows[positions[i]] for every `0 <= position < m`, and their number; other rows of `out` are left alone.

    Args:
        rows: float32 `[m, dim]`.
        positions: int64 `[n]`.
        out: float32 `[n, dim]`; rows may lie apart, columns may not.
        stream: Past the caches; only where `can_stream(out)`.
    """
    return int(gather_range(rows, positions, out, stream, rows_ahead(rows.shape[1])))


def gather_shared(rows: Float32, positions: Int64, out: Float32, stream: bool, counter: WorkCounter) -> None:
    """As `gather`, by as many threads as call this with the same arguments; each takes some rows, and some more.

    Fails `counter` where there is no row at a position. `stream` where `out` cannot be streamed is looked over.
    """
    dim = rows.shape[1]
    _gather_shared(rows, positions, out, stream, rows_ahead(dim), counter.state, rows_in_piece(dim))


def rows_in_piece(dim: int) -> int:
    """Rows of a piece, the least that a thread takes at a time; prefetching begins anew for each."""
    return max(256, _VALUES_A_PIECE // dim)


def gather_marked(rows: Float32, marks: UInt64, ids: Int64, out: Float32, missing: Int64, stream: bool) -> int:
    """out[i] = rows[ids[i]] where the id's bit is set; `missing` gets the other i, and their number is returned.

    Args:
        rows: float32 `[m, dim]`.
        marks: uint64 `[ceil(m / 64)]`: bit `id & 63` of word `id >> 6` says whether the id has a row.
        ids: int64 `[n]`; those outside `0 <= id < m` are missing.
        out: float32 `[n, dim]`; rows may lie apart, columns may not.
        missing: int64 `[n]`.
        stream: See `gather`.
    """
    return int(_gather_marked(rows, marks, ids, out, missing, stream, rows_ahead(rows.shape[1])))


def gather_apart(rows: Float32, positions: Int64, places: Int64, out: Float32, stream: bool) -> None:
    """out[places[i]] = rows[positions[i]]; nothing for negative positions.

    Args:
        rows: float32 `[m, dim]`.
        positions: int64 `[n]`, below m.
        places: int64 `[n]`, rows of `out`, each once.
        out: float32 `[k, dim]`; rows may lie apart, columns may not.
        stream: See `gather`.
    """
    _gather_apart(rows, positions, places, out, stream, rows_ahead(rows.shape[1]))


def scatter_rows(rows: Float32, places: Int64, out: Float32) -> None:
    """out[places[i]] = rows[i]; as `gather_apart`, of rows that lie in order."""
    _scatter(rows, places, out, can_stream(out))


def scale_rows(rows: Float32, places: Int64, factor: np.float32) -> None:
    """rows[places[i]] *= factor, in place; places int64 `[n]`, each once."""
    if factor != 1:
        rows[places] *= factor


@inlined
def _move(out: Float32, at: int, rows: Float32, position: int, stream: bool) -> None:
    if stream:
        stream_row(out, at, rows, position)
    else:
        copy_row(out, at, rows, position)


@kernel
def gather_range(rows: Float32, positions: Int64, out: Float32, stream: bool, ahead: int) -> int:
    """`gather` within a kernel; `ahead`: what `rows_ahead` says."""
    last = len(positions) - 1
    size = np.uint64(len(rows))
    count = 0
    for i in range(len(positions)):
        # A position of -1 asks for an address before the rows: harmless, and no branch.
        prefetch_row(rows, positions[min(i + ahead, last)])
        p = positions[i]
        if np.uint64(p) < size:
            count += 1
            _move(out, i, rows, p, stream)
    fence()
    return count


@kernel
def _gather_shared(
    rows: Float32, positions: Int64, out: Float32, stream: bool, ahead: int, counter: Int64, size: int
) -> None:
    join_work(counter)
    stream = stream and _can_stream(out)
    total = (len(positions) + size - 1) // size
    first, last = next_pieces(counter, total)
    while first < last:
        start, stop = first * size, min(last * size, len(positions))
        if gather_range(rows, positions[start:stop], out[start:stop], stream, ahead) < stop - start:
            fail_work(counter)
        first, last = next_pieces(counter, total)
    leave_work(counter)


@kernel
def _gather_marked(
    rows: Float32, marks: UInt64, ids: Int64, out: Float32, missing: Int64, stream: bool, ahead: int
) -> int:
    last = len(ids) - 1
    size = np.uint64(len(rows))
    count = 0
    for i in range(len(ids)):
        prefetch_row(rows, ids[min(i + ahead, last)])
        p = ids[i]
        if np.uint64(p) < size and (marks[p >> 6] >> np.uint64(p & 63)) & np.uint64(1):
            _move(out, i, rows, p, stream)
        else:
            missing[count] = i
            count += 1
    fence()
    return count


@kernel
def _gather_apart(rows: Float32, positions: Int64, places: Int64, out: Float32, stream: bool, ahead: int) -> None:
    last = len(positions) - 1
    for i in range(len(positions)):
        prefetch_row(rows, positions[min(i + ahead, last)])
        p = positions[i]
        if p >= 0:
            _move(out, places[i], rows, p, stream)
    fence()


@kernel
def _scatter(rows: Float32, places: Int64, out: Float32, stream: bool) -> None:
    for i in range(len(places)):
        _move(out, places[i], rows, i, stream)
    fence()
