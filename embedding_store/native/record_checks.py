"""Records with checks, as they lie in a file that is mapped into memory; `check_of` also checks those in Redis.

A record is one part or two: the bytes that are often read alone, and the others. A part is a check of 8 bytes, then its
bytes, padded to whole words of 8 bytes. So the first part can be read and checked by itself. A check covers the id and
the position too: a record in the wrong place, or of another id, fails. No check is 0, so what was never written is no
record.
"""

import numpy as np

from elastable.embedding_store.contract.arrays import UInt8
from elastable.embedding_store.native.intrinsics import copy_bytes, prefetch_line, word_at
from elastable.embedding_store.native.kernel import inlined, kernel

FACTOR, OTHER_FACTOR = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_LOW = 0xFFFFFFFF
_LINE = 64  # bytes that a processor fetches at a time


@kernel
def record_stride(first: int, rest: int) -> int:
    """Bytes that a record takes in a file, whose parts are of `first` and `rest` bytes; `rest` may be 0."""
    return part_stride(first) + part_stride(rest)


@inlined
def part_stride(size: int) -> int:
    """Bytes that a part takes."""
    return 8 + (size + 7) // 8 * 8 if size else 0


@inlined
def prefetch_bytes(lines: UInt8, at: int, size: int) -> None:
    """Asks for bytes of a file, uint8 `[length, 1]`; made so by the caller, once, as that takes longer than this."""
    for line in range(0, size, _LINE):
        prefetch_line(lines, at + line, 0)


@inlined
def load_first(file: UInt8, at: int, first: int, key: np.uint64, staged: UInt8, flat: UInt8, to: int) -> bool:
    """Reads the first part of the record at byte `at` into `flat`, from byte `to` on; False where it fails its check.

    Args:
        file: uint8, and all of the part lies in it.
        first: Bytes of the part.
        key: Of the record, as `record_key`.
        staged: uint8: room for the part. It is checked as it was copied, not on the way: the compiler reads twice
            then, and a writer may come between.
        flat: uint8.
    """
    copy_bytes(staged, 0, file, at, part_stride(first))
    if word_at(staged, 0) != check_of(staged, 8, first, key):
        return False
    copy_bytes(flat, to, staged, 8, first)
    return True


@inlined
def record_key(row_id: int, position: int) -> np.uint64:
    """What a record's checks say of its place."""
    mixed = (np.uint64(row_id) ^ (np.uint64(position) * np.uint64(FACTOR))) * np.uint64(OTHER_FACTOR)
    return mixed ^ (mixed >> np.uint64(32))


@inlined
def check_of(part: UInt8, start: int, size: int, key: np.uint64) -> np.uint64:
    """Of `size` bytes from `start` on; a sum of products, so that the processor takes several words at a time.

    Bytes that fill the last word, which must lie in the array too, do not count.
    """
    total, whole = key, size // 8
    for k in range(whole):
        total += _term(word_at(part, start + 8 * k), k, key)
    if size % 8:
        mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - 8 * (size % 8))
        total += _term(word_at(part, start + 8 * whole) & mask, whole, key)
    return np.uint64(1) if total == np.uint64(0) else total


@inlined
def _term(word: np.uint64, k: int, key: np.uint64) -> np.uint64:
    """What word `k` adds to a check."""
    mixed = word ^ (key + np.uint64(k) * np.uint64(FACTOR))
    return word + (mixed & np.uint64(_LOW)) * (mixed >> np.uint64(32))
