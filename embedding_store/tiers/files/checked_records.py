"""Records with checks (`native/record_checks`), moved between memory and a file by machine code."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.native.kernel import inlined, kernel
from elastable.embedding_store.native.record_checks import (
    FACTOR,
    OTHER_FACTOR,
    check_of,
    part_stride,
    prefetch_bytes,
    record_key,
    record_stride,
)
from elastable.embedding_store.native.row_moves import copy_bytes, put_word, word_at

__all__ = ["invalidate", "load_checked", "owner_stamps", "read_items", "store_checked", "write_items"]

_SIGNATURE = types.intp(types.int32, types.uintp, types.uintp, types.int64)
_pread = types.ExternalFunction("pread", _SIGNATURE)
_pwrite = types.ExternalFunction("pwrite", _SIGNATURE)

_RECORDS_AHEAD = 6
_RUN_BYTES = 1 << 18  # that one system call writes; written so, the system's cache has large pages and is read faster
_LEAST_RUN_BYTES = 1 << 14  # from here on, a system call is no slower than writing through memory
_GAP_BYTES = 1 << 12  # up to here, to write what lies between two records takes less time than a second system call


@kernel
def load_checked(
    file: UInt8,
    fd: int,
    begin: int,
    items: int,
    first: int,
    rest: int,
    ids: Int64,
    positions: Int64,
    rows: UInt8,
    start: int,
    stop: int,
    failed: npt.NDArray[np.bool_],
) -> int:
    """Reads records and checks them.

    A record that another thread writes meanwhile is read as it was, as it will be, or it fails.

    Args:
        file: uint8: the file, mapped; what lies beyond it is read by system calls.
        fd: The open file.
        begin: Where in it record 0 lies, in bytes.
        items: How many records there may be.
        first, rest: Bytes of a record's parts.
        ids, positions: int64 `[n]`; a position out of range fails.
        rows: uint8 `[n, width]`: the first bytes of each record go here. A row whose record fails is left as it was.
        start, stop: The range of records that are read.
        failed: bool `[n]`: is set where a record is not there or fails its check.

    Returns:
        How many failed.
    """
    width, stride = rows.shape[1], record_stride(first, rest)
    second = part_stride(first)
    taken = second if width <= first else stride
    staged, flat, lines = np.empty(stride, np.uint8), rows.reshape(-1), file.reshape(-1, 1)
    count = 0
    for i in range(start, stop):
        prefetch_bytes(lines, begin + stride * positions[min(i + _RECORDS_AHEAD, stop - 1)], taken)
        at = begin + stride * positions[i]
        whole = 0 <= positions[i] < items
        if not whole:
            pass
        elif at + taken <= len(file):
            # Checked as it was copied, not on the way: the compiler reads twice then, and a writer may come between.
            copy_bytes(staged, 0, file, at, taken)
        else:
            whole = _pread(np.int32(fd), np.uintp(staged.ctypes.data), np.uintp(taken), np.int64(at)) == taken
        key = record_key(ids[i], positions[i])
        whole = whole and word_at(staged, 0) == check_of(staged, 8, first, key)
        if whole and taken > second:
            whole = word_at(staged, second) == check_of(staged, second + 8, rest, key)
        if not whole:
            failed[i] = True
            count += 1
            continue
        copy_bytes(flat, width * i, staged, 8, min(width, first))
        if taken > second:
            copy_bytes(flat, width * i + first, staged, second + 8, width - first)
    return count


@kernel
def store_checked(
    file: UInt8,
    through: bool,
    fd: int,
    begin: int,
    first: int,
    ids: Int64,
    positions: Int64,
    rows: UInt8,
    order: Int64,
    start: int,
    stop: int,
) -> int:
    """Writes records with their checks. Nobody else writes records meanwhile, except of other ranges of `order`.

    Args:
        file: uint8: the file, mapped, with room for all the records; empty: it cannot be mapped.
        through: Whether records are written through `file`, which is writable then. Many that follow one another are
            written by one system call all the same. If False, one system call also writes records that lie near one
            another, and what lies between them again; the range must be all of `order` then.
        fd: The open file.
        begin: Where in it record 0 lies, in bytes.
        first: Bytes of a record's first part.
        ids, positions: int64 `[n]`.
        rows: uint8 `[n, record_bytes]`.
        order: int64 `[n]`: indices of the rows by ascending position.
        start, stop: The range of `order` that is written.

    Returns:
        -1, or the index in `order` of a record that could not be written.
    """
    width = rows.shape[1]
    stride, flat, lines = record_stride(first, width - first), rows.reshape(-1), file.reshape(-1, 1)
    most, gap = max(1, _RUN_BYTES // stride), 1
    if len(file) and not through:
        gap += _GAP_BYTES // stride
    staged, at = np.empty(most * stride, np.uint8), begin
    i = start
    while i < stop:
        after = _run_end(positions, order, i, stop, most, gap)
        size = stride * (positions[order[after - 1]] - positions[order[i]] + 1)
        in_place = through and size < _LEAST_RUN_BYTES
        end = at = begin + stride * positions[order[i]]
        for k in range(i, after):
            if len(file):
                prefetch_bytes(lines, begin + stride * positions[order[min(k + _RECORDS_AHEAD, stop - 1)]], stride)
            place = begin + stride * positions[order[k]]
            if in_place:
                _put_record(file, place, flat, order[k], width, first, ids, positions)
            else:
                if place > end:
                    copy_bytes(staged, end - at, file, end, place - end)
                _put_record(staged, place - at, flat, order[k], width, first, ids, positions)
            end = place + stride
        if in_place:
            pass
        elif _pwrite(np.int32(fd), np.uintp(staged.ctypes.data), np.uintp(size), np.int64(at)) != size:
            return i
        i = after
    return -1


@kernel
def invalidate(fd: int, begin: int, stride: int, positions: Int64) -> int:
    """Makes records at `positions` fail; -1, or the index of one that could not be written."""
    zero = np.zeros(8, np.uint8)
    for i in range(len(positions)):
        if _pwrite(np.int32(fd), np.uintp(zero.ctypes.data), np.uintp(8), np.int64(begin + stride * positions[i])) != 8:
            return i
    return -1


@kernel
def read_items(file: UInt8, fd: int, begin: int, positions: Int64, items: UInt8) -> int:
    """Reads item `positions[i]` of a file into row i of `items` uint8 `[n, size]`; returns as `write_items`."""
    size, flat = items.shape[1], items.reshape(-1)
    for i in range(len(positions)):
        at = begin + size * positions[i]
        if at + size <= len(file):
            copy_bytes(flat, i * size, file, at, size)
        elif _pread(np.int32(fd), np.uintp(flat.ctypes.data + i * size), np.uintp(size), np.int64(at)) != size:
            return i
    return -1


@kernel
def write_items(fd: int, begin: int, positions: Int64, items: UInt8) -> int:
    """Writes row i of `items` uint8 `[n, size]` as item `positions[i]`; -1, or the index of one that cannot be."""
    size, flat = items.shape[1], items.reshape(-1)
    i = 0
    while i < len(positions):
        run = 1
        while i + run < len(positions) and positions[i + run] == positions[i] + run:
            run += 1
        at = np.int64(begin + size * positions[i])
        if _pwrite(np.int32(fd), np.uintp(flat.ctypes.data + i * size), np.uintp(size * run), at) != size * run:
            return i
        i += run
    return -1


def owner_stamps(ids: Int64, positions: Int64) -> Int64:
    """What says that an id owns a position, int64 `[n]`, never 0."""
    mixed = ids.view(np.uint64) * np.uint64(FACTOR) ^ (positions.view(np.uint64) + np.uint64(1)) * np.uint64(
        OTHER_FACTOR
    )
    stamps: Int64 = ((mixed ^ (mixed >> np.uint64(32))) | np.uint64(1)).view(np.int64)
    return stamps


@inlined
def _run_end(positions: Int64, order: Int64, start: int, stop: int, most: int, gap: int) -> int:
    """Where in `order` a run ends that begins at `start`: over `most` positions at most, from one to the next `gap`."""
    end = start + 1
    while (
        end < stop
        and positions[order[end]] - positions[order[end - 1]] <= gap
        and positions[order[end]] - positions[order[start]] < most
    ):
        end += 1
    return end


@inlined
def _put_record(
    target: UInt8, at: int, flat: UInt8, row: int, width: int, first: int, ids: Int64, positions: Int64
) -> None:
    key = record_key(ids[row], positions[row])
    _put_part(target, at, flat, row * width, first, key)
    if width > first:
        _put_part(target, at + part_stride(first), flat, row * width + first, width - first, key)


@inlined
def _put_part(staged: UInt8, at: int, flat: UInt8, source: int, size: int, key: np.uint64) -> None:
    put_word(staged, at + part_stride(size) - 8, 0)  # its last bytes may be padding
    copy_bytes(staged, at + 8, flat, source, size)
    put_word(staged, at, check_of(staged, at + 8, size, key))
