"""Rows moved between memory and a file of records, without an object per row.

A record is a check of 8 bytes and the row, padded to whole words. The check
covers the position too, so that a record in the wrong place is seen.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.native.copy import copy_bytes
from elastable.embedding_store.native.kernel import kernel, prefetch_line

__all__ = ["copy_records", "load_records", "new_chunks", "record_words", "store_records"]

_Words = npt.NDArray[np.uint64]
_Bytes = npt.NDArray[np.uint8]

_SIGNATURE = types.intp(types.int32, types.uintp, types.uintp, types.int64)
_pread = types.ExternalFunction("pread", _SIGNATURE)
_pwrite = types.ExternalFunction("pwrite", _SIGNATURE)

_LANES = 4
_RECORDS_AHEAD = 6
_FACTOR = 0x9E3779B97F4A7C15


@kernel
def record_words(row_bytes: int) -> int:
    """Words of 8 bytes that a record of a row of so many bytes takes."""
    return 1 + (row_bytes + 7) // 8


@kernel
def load_records(
    fd: int, begin: int, positions: Int64, rows: _Bytes, targets: Int64, row_bytes: int, words: _Words
) -> tuple[int, int]:
    """Reads records and checks them.

    Args:
        fd: An open file.
        begin: Where in it record 0 lies, in bytes.
        positions: int64 `[n]`, records to read.
        rows: uint8 `[m * row_bytes]`, where rows go.
        targets: int64 `[n]`: record `positions[i]` becomes row `targets[i]`.
        row_bytes: Bytes of a row.
        words: uint64 `[k * record_words(row_bytes)]`, for the kernel's own use: where positions follow one
            another, one system call moves up to k records.

    Returns:
        -1 and 0; or the index of a record that could not be read (1) or whose check is wrong (2), and which of it.
    """
    size = record_words(row_bytes)
    some = words.view(np.uint8)
    i = 0
    while i < len(positions):
        run = _run(positions, i, len(words) // size)
        wanted = 8 * size * run
        at = np.int64(begin + 8 * size * positions[i])
        if _pread(np.int32(fd), np.uintp(words.ctypes.data), np.uintp(wanted), at) != wanted:
            return i, 1
        for k in range(run):
            if words[k * size] != _check(words, k * size + 1, size - 1, positions[i + k]):
                return i + k, 2
            copy_bytes(rows, targets[i + k] * row_bytes, some, 8 * (k * size + 1), row_bytes)
        i += run
    return -1, 0


@kernel
def copy_records(file: _Words, begin: int, positions: Int64, rows: _Bytes, targets: Int64, row_bytes: int) -> int:
    """As `load_records`, of a file that is mapped.

    Args:
        file: uint64, all of the file; every record lies in it.
        begin: Where in it record 0 lies, in words.

    Returns:
        -1, or the index of a record whose check is wrong.
    """
    size = record_words(row_bytes)
    lines, some, last = file.reshape(-1, 1), file.view(np.uint8), len(positions) - 1
    for i in range(len(positions)):
        later = begin + size * positions[min(i + _RECORDS_AHEAD, last)]
        for word in range(0, size, 8):
            prefetch_line(lines, later + word, 0)
        at = begin + size * positions[i]
        if file[at] != _check(file, at + 1, size - 1, positions[i]):
            return i
        copy_bytes(rows, targets[i] * row_bytes, some, 8 * (at + 1), row_bytes)
    return -1


@kernel
def store_records(
    fd: int, begin: int, positions: Int64, rows: _Bytes, sources: Int64, row_bytes: int, words: _Words
) -> int:
    """Writes row `sources[i]` as record `positions[i]`; -1, or the index of a record that could not be written."""
    size = record_words(row_bytes)
    some = words.view(np.uint8)
    i = 0
    while i < len(positions):
        run = _run(positions, i, len(words) // size)
        for k in range(run):
            words[(k + 1) * size - 1] = 0  # its last bytes may be padding
            copy_bytes(some, 8 * (k * size + 1), rows, sources[i + k] * row_bytes, row_bytes)
            words[k * size] = _check(words, k * size + 1, size - 1, positions[i + k])
        wanted = 8 * size * run
        at = np.int64(begin + 8 * size * positions[i])
        if _pwrite(np.int32(fd), np.uintp(words.ctypes.data), np.uintp(wanted), at) != wanted:
            return i
        i += run
    return -1


@kernel
def new_chunks(positions: Int64, chunk: int, taken: npt.NDArray[np.bool_], fresh: Int64) -> int:
    """Chunks of `chunk` positions that are not taken yet, into `fresh` int64 `[n]`, some repeated; how many."""
    count = 0
    for i in range(len(positions)):
        number = positions[i] // chunk
        if (number >= len(taken) or not taken[number]) and (count == 0 or fresh[count - 1] != number):
            fresh[count] = number
            count += 1
    return count


@kernel
def _run(positions: Int64, start: int, most: int) -> int:
    """How many positions follow one another from `start` on, up to `most`."""
    run = 1
    while run < most and start + run < len(positions) and positions[start + run] == positions[start] + run:
        run += 1
    return run


@kernel
def _check(words: _Words, start: int, count: int, position: int) -> np.uint64:
    """Four lanes, so that multiplications run side by side; any changed bit changes the sum."""
    factor = np.uint64(_FACTOR)
    a = np.uint64(position) + factor
    b, c, d = a ^ np.uint64(1), a ^ np.uint64(2), a ^ np.uint64(3)
    k, end = start, start + count
    while k + _LANES <= end:
        a = _stir(a, words[k], factor)
        b = _stir(b, words[k + 1], factor)
        c = _stir(c, words[k + 2], factor)
        d = _stir(d, words[k + 3], factor)
        k += _LANES
    while k < end:
        a = _stir(a, words[k], factor)
        k += 1
    return _stir(_stir(_stir(a, b, factor), c, factor), d, factor)


@kernel
def _stir(lane: np.uint64, word: np.uint64, factor: np.uint64) -> np.uint64:
    mixed = (lane ^ word) * factor
    return mixed ^ (mixed >> np.uint64(29))
