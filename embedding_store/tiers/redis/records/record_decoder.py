"""The kernel that decodes replies of records, as far as they have come.

A record is `$<width>\\r\\n<record>\\r\\n`. Of records that are all there, header
and end are compared as whole words; anything else is read byte by byte.
"""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.row_moves import copy_bytes, word_at
from elastable.embedding_store.tiers.redis.records.record_requests import Parts

__all__ = ["DONE", "ERROR_LINE", "MORE", "NO_STAMP", "UNEXPECTED", "decode_records"]

NO_STAMP = -1

# What `decode_records` stopped for, and what a place below 0 means in its callees.
DONE, MORE, ERROR_LINE, UNEXPECTED = 0, -1, -2, -3

_CR, _LF, _STAR, _PLUS, _MINUS, _DOLLAR, _ZERO, _NINE = (ord(c) for c in "\r\n*+-$09")
_CRLF = _CR | _LF << 8  # as they lie in a little-endian word
_NIL_BYTES = 5  # $-1\r\n, as long as +OK\r\n and the shortest of all elements


@kernel
def _read_number(received: UInt8, start: int, stop: int) -> tuple[int, int]:
    """(number, place behind it) of `<kind><number>\\r\\n` at `start`."""
    at = start + 1
    number = 0
    while at < stop and _ZERO <= received[at] <= _NINE and at - start < 19:
        number = number * 10 + (received[at] - _ZERO)
        at += 1
    if at < stop and (received[at] != _CR or at == start + 1):
        return 0, UNEXPECTED
    if at + 2 > stop:
        return 0, MORE
    if received[at + 1] != _LF:
        return 0, UNEXPECTED
    return number, at + 2


@kernel
def _find_bulk(received: UInt8, start: int, stop: int, width: int) -> tuple[int, int]:
    """(first byte, place behind) of a bulk string of `width` bytes at `start`; first byte -1: nil."""
    if stop - start < _NIL_BYTES:
        return 0, MORE
    if received[start] != _DOLLAR:
        return 0, UNEXPECTED
    if received[start + 1] == _MINUS:
        nil = received[start + 2] == _ZERO + 1 and received[start + 3] == _CR and received[start + 4] == _LF
        return -1, (start + _NIL_BYTES if nil else UNEXPECTED)
    number, first = _read_number(received, start, stop)
    if first < 0 or number != width:
        return 0, (first if first < 0 else UNEXPECTED)
    if stop - first < width + 2:
        return 0, MORE
    if received[first + width] != _CR or received[first + width + 1] != _LF:
        return 0, UNEXPECTED
    return first, first + width + 2


@kernel
def _find_header(received: UInt8, start: int, stop: int, elements: int) -> int:
    """Place behind the `*<elements>\\r\\n` at `start`; elements -1: behind an `+OK\\r\\n`."""
    if start >= stop:
        return MORE
    if received[start] == _MINUS:
        return ERROR_LINE
    if elements < 0:
        if received[start] != _PLUS:
            return UNEXPECTED
        return start + _NIL_BYTES if stop - start >= _NIL_BYTES else MORE
    if received[start] != _STAR:
        return UNEXPECTED
    number, behind = _read_number(received, start, stop)
    return behind if behind < 0 or number == elements else UNEXPECTED


@kernel
def _int64_at(received: UInt8, first: int) -> int:
    bits = np.uint64(0)
    for i in range(8):
        bits |= np.uint64(received[first + i]) << np.uint64(8 * i)
    return np.int64(bits)  # type: ignore[return-value]  # an int64 inside the kernel


@kernel
def _usual_header(width: int) -> tuple[int, int, int]:
    """`$<width>\\r\\n`: its bytes as a word, their mask, their number; 0: a word is too short."""
    digits = 1
    power = 10
    while width >= power:
        digits += 1
        power *= 10
    if digits > 5:
        return np.uint64(0), np.uint64(0), 0  # type: ignore[return-value]  # uint64 inside the kernel
    word = np.uint64(_DOLLAR)
    rest = width
    for i in range(digits):
        word |= np.uint64(_ZERO + rest % 10) << np.uint64(8 * (digits - i))
        rest //= 10
    word |= np.uint64(_CRLF) << np.uint64(8 * (digits + 1))
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - 8 * (digits + 3))
    return word, mask, digits + 3  # type: ignore[return-value]


@kernel
def _copy_usual_records(
    received: UInt8, start: int, stop: int, part: np.void, first: int, positions: Int64, width: int,
    rows: UInt8, taken: int, missing: UInt8,
) -> tuple[int, int]:  # fmt: skip
    """Copies records from number `first` of the part on, while they are whole and there: (records, place behind)."""
    word, mask, size = _usual_header(width)
    stride = size + width + 2
    at = start
    row = first
    # A word is read of the header and of the last 8 bytes: of shorter records the header is part of those.
    while size and row < part["rows"] and at + stride <= stop:
        if word_at(received, at) & mask != word or word_at(received, at + stride - 8) >> np.uint64(48) != np.uint64(
            _CRLF
        ):
            break
        position = positions[part["row_at"] + row]
        missing[position] = 0
        copy_bytes(rows, position * taken, received, at + size, taken)
        at += stride
        row += 1
    return row - first, at


@kernel
def decode_records(
    received: UInt8, start: int, stop: int, parts: Parts, positions: Int64, width: int, asking: bool,
    rows: UInt8, taken: int, missing: UInt8, stamps: Int64, state: Int64,
) -> tuple[int, int]:  # fmt: skip
    """Decodes as far as it can: (status, place of the first byte left).

    Args:
        received: What has come, from `start` to `stop`.
        start, stop: Places in it.
        parts: `PART` `[p]`, as they were asked for.
        positions: int64: record i of all parts goes to `rows[positions[i]]`.
        width: Bytes of a record.
        asking: Whether an ASKING went before each part.
        rows: uint8, `taken` bytes each.
        taken: Bytes that are kept of each record.
        missing: uint8, 1 where there is no record, by position.
        stamps: int64 `[p]`; `NO_STAMP` where there is none.
        state: int64 `[2]`, zeros at first: the part, and the step within its
            reply (0: the reply to ASKING, 1: the header, 2 and up: bulk strings).
    """
    at = start
    while state[0] < len(parts):
        part = parts[state[0]]
        elements = part["rows"] + 1
        for step in range(0 if asking else 1, 2):
            if state[1] <= step:
                behind = _find_header(received, at, stop, elements if step else -1)
                if behind < 0:
                    return behind, at
                at = behind
                state[1] = step + 1
        element = state[1] - 2
        while element < elements:
            row = element - 1
            if row >= 0:
                copied, at = _copy_usual_records(
                    received, at, stop, part, row, positions, width, rows, taken, missing
                )  # fmt: skip
                element += copied
                row += copied
            state[1] = element + 2
            if element == elements:
                break
            first, behind = _find_bulk(received, at, stop, 8 if row < 0 else width)
            if behind < 0:
                return behind, at
            at = behind
            if row < 0:
                stamps[state[0]] = NO_STAMP if first < 0 else _int64_at(received, first)
            else:
                position = positions[part["row_at"] + row]
                missing[position] = first < 0
                if first >= 0:
                    copy_bytes(rows, position * taken, received, first, taken)
            element += 1
        state[0] += 1
        state[1] = 0
    return DONE, at
