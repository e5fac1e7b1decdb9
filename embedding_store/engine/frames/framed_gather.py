"""Rows in frames gathered by position, a piece at a time; those without a frame are read from mapped memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int32, Int64, UInt8
from elastable.embedding_store.contract.tier import MappedRecords
from elastable.embedding_store.engine.frames.frame_kernels import frames_at
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.range_pool import WorkCounter, fail_work, next_pieces
from elastable.embedding_store.native.record_checks import load_first, part_stride, prefetch_bytes, record_key
from elastable.embedding_store.native.row_gather import can_stream, gather_range, rows_ahead, rows_in_piece
from elastable.embedding_store.rows.checks import any_outside

__all__ = ["NOWHERE", "ColdSource", "gather_framed"]


@dataclass(frozen=True, slots=True)
class ColdSource:
    """Where rows without a frame are read on the way.

    Attributes:
        records: Of the table; their first part is a row, in float32.
        ids: int64 `[rows]`, of every position; empty: an id is its position.
        out: uint8: all bytes of the target, whose rows lie side by side.
    """

    records: MappedRecords
    ids: Int64
    out: UInt8


NOWHERE = ColdSource(MappedRecords(np.empty(0, np.uint8), 0, 0, 0, 0), np.empty(0, np.int64), np.empty(0, np.uint8))
"""Rows without a frame are left alone."""


def gather_framed(
    rows: Float32,
    frame_of: Int32,
    heat: UInt8,
    positions: Int64,
    out: Float32,
    stream: bool,
    source: ColdSource,
    cold: Int64,
    unread: Int64,
    counter: WorkCounter | None = None,
) -> tuple[int, int]:
    """out[i] = the row in the frame of positions[i], where it has one, else what `source` has.

    Args:
        rows: float32 `[frames, dim]`.
        frame_of, heat, positions: As of `frames_at`.
        out: float32 `[n, dim]`; rows may lie apart, columns may not. Other rows are left alone.
        stream: Past the caches; without `counter` only where `can_stream(out)`.
        source: Reads rows without a frame.
        cold: int64 `[n]`, gets the indices of positions without a frame.
        unread: int64 `[n]`, gets those of them that `source` does not have.
        counter: Of the threads that call this with the same arguments, but for `cold` and `unread`, which are each
            thread's own. Each has joined it, and takes some rows, and some more. Where a position is not one of
            `frame_of`, it fails, and rows may be missing in `out`. None: this thread takes all rows, at positions
            that are known to be right.

    Returns:
        How many are cold, and how many unread.
    """
    dim = rows.shape[1]
    ahead, size = rows_ahead(dim), rows_in_piece(dim)
    of_source = *_taken(source), cold, unread
    if counter is None:
        more, left = _gather(rows, frame_of, heat, positions, out, stream, *of_source, 0, ahead, size)
    else:
        rest = *of_source, ahead, size, counter.state
        more, left = _gather_shared(rows, frame_of, heat, positions, out, stream and can_stream(out), *rest)
    return int(more), int(left)


def _taken(source: ColdSource) -> tuple[UInt8, int, int, int, int, Int64, UInt8]:
    records = source.records
    return records.file, records.begin, records.items, records.first, records.stride, source.ids, source.out


@kernel
def _gather_shared(
    rows: Float32,
    frame_of: Int32,
    heat: UInt8,
    positions: Int64,
    out: Float32,
    stream: bool,
    file: UInt8,
    begin: int,
    items: int,
    first_bytes: int,
    stride: int,
    ids: Int64,
    flat: UInt8,
    cold: Int64,
    unread: Int64,
    ahead: int,
    size: int,
    counter: Int64,
) -> tuple[int, int]:
    count, missed, total = 0, 0, (len(positions) + size - 1) // size
    first, last = next_pieces(counter, total)
    while first < last:
        start, stop = first * size, min(last * size, len(positions))
        if any_outside(positions[start:stop], len(frame_of)):
            fail_work(counter)
        else:
            some, its = positions[start:stop], out[start:stop]
            more, left = _gather(
                rows, frame_of, heat, some, its, stream, file, begin, items, first_bytes, stride, ids, flat,
                cold[count:], unread[missed:], start, ahead, size,
            )  # fmt: skip
            count += more
            missed += left
        first, last = next_pieces(counter, total)
    return count, missed


@kernel
def _gather(
    rows: Float32,
    frame_of: Int32,
    heat: UInt8,
    positions: Int64,
    out: Float32,
    stream: bool,
    file: UInt8,
    begin: int,
    items: int,
    first_bytes: int,
    stride: int,
    ids: Int64,
    flat: UInt8,
    cold: Int64,
    unread: Int64,
    base: int,
    ahead: int,
    size: int,
) -> tuple[int, int]:
    """In loops a piece: reads of the first, which finds the frames, do not wait for those of the second.

    Records of rows without a frame are asked for before the others are copied, and are there afterwards.
    """
    count, missed, frames = 0, 0, np.empty(min(size, len(positions)), np.int64)
    staged, lines, part = np.empty(part_stride(first_bytes), np.uint8), file.reshape(-1, 1), part_stride(first_bytes)
    for start in range(0, len(positions), size):
        stop = min(start + size, len(positions))
        found = cold[count:]
        more = frames_at(frame_of, heat, positions[start:stop], frames, found, True)
        if len(file):
            for k in range(more):
                prefetch_bytes(lines, begin + stride * positions[start + found[k]], part)
        gather_range(rows, frames[: stop - start], out[start:stop], stream, ahead)
        for k in range(more):
            found[k] += base + start
            position = positions[found[k] - base]
            at = begin + stride * position
            there = position < items and at + part <= len(file)
            if there:
                row_id = ids[position] if len(ids) else position
                there = load_first(
                    file, at, first_bytes, record_key(row_id, position), staged, flat, first_bytes * found[k]
                )
            if not there:
                unread[missed] = found[k]
                missed += 1
        count += more
    return count, missed
