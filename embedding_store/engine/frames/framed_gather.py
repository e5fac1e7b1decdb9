"""Rows in frames gathered by position, a piece at a time; finds those that have no frame."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int32, Int64, UInt8
from elastable.embedding_store.engine.frames.frame_kernels import frames_at
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.row_gather import can_stream, gather_range, rows_ahead, rows_in_piece
from elastable.embedding_store.native.work_stealing import WorkCounter, fail_work, next_pieces
from elastable.embedding_store.rows.checks import any_outside

__all__ = ["gather_framed", "gather_framed_shared"]


def gather_framed(
    rows: Float32, frame_of: Int32, heat: UInt8, positions: Int64, out: Float32, stream: bool, cold: Int64
) -> int:
    """out[i] = the row in the frame of positions[i], where it has one.

    Args:
        rows: float32 `[frames, dim]`.
        frame_of, heat, positions: As of `frames_at`.
        out: float32 `[n, dim]`; rows may lie apart, columns may not. Other rows are left alone.
        stream: Past the caches; only where `can_stream(out)`.
        cold: int64 `[n]`, gets the indices of positions without a frame.

    Returns:
        How many are cold.
    """
    dim = rows.shape[1]
    return int(_gather(rows, frame_of, heat, positions, out, stream, cold, rows_ahead(dim), rows_in_piece(dim)))


def gather_framed_shared(
    rows: Float32,
    frame_of: Int32,
    heat: UInt8,
    positions: Int64,
    out: Float32,
    stream: bool,
    cold: Int64,
    counter: WorkCounter,
) -> int:
    """As `gather_framed`, by as many threads as call this with the same arguments, but a `cold` of its own each.

    Each takes some rows, and some more; it has joined `counter`. Where a position is not one of `frame_of`, `counter`
    fails, and rows may be missing in `out`.
    """
    dim = rows.shape[1]
    rest = cold, rows_ahead(dim), rows_in_piece(dim), counter.state
    return int(_gather_shared(rows, frame_of, heat, positions, out, stream and can_stream(out), *rest))


@kernel
def _gather_shared(
    rows: Float32,
    frame_of: Int32,
    heat: UInt8,
    positions: Int64,
    out: Float32,
    stream: bool,
    cold: Int64,
    ahead: int,
    size: int,
    counter: Int64,
) -> int:
    count, total = 0, (len(positions) + size - 1) // size
    first, last = next_pieces(counter, total)
    while first < last:
        start, stop = first * size, min(last * size, len(positions))
        if any_outside(positions[start:stop], len(frame_of)):
            fail_work(counter)
        else:
            found = cold[count:]
            more = _gather(rows, frame_of, heat, positions[start:stop], out[start:stop], stream, found, ahead, size)
            found[:more] += start
            count += more
        first, last = next_pieces(counter, total)
    return count


@kernel
def _gather(
    rows: Float32,
    frame_of: Int32,
    heat: UInt8,
    positions: Int64,
    out: Float32,
    stream: bool,
    cold: Int64,
    ahead: int,
    size: int,
) -> int:
    """In two loops a piece: reads of the first, which finds the frames, do not wait for those of the second."""
    count, frames = 0, np.empty(min(size, len(positions)), np.int64)
    for start in range(0, len(positions), size):
        stop = min(start + size, len(positions))
        found = cold[count:]
        more = frames_at(frame_of, heat, positions[start:stop], frames, found, True)
        found[:more] += start
        count += more
        gather_range(rows, frames[: stop - start], out[start:stop], stream, ahead)
    return count
