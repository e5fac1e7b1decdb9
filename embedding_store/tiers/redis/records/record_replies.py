"""Replies to the requests of `record_requests`, decoded as they arrive."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.native.intrinsics import copy_bytes, word_at
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.tiers.redis.connections.redis_exchange import Replies
from elastable.embedding_store.tiers.redis.records.record_requests import Parts

_LONGEST_LINE = 65_536


@dataclass(frozen=True, slots=True)
class Awaited:
    """Records of one table that one server will send.

    Attributes:
        parts: `PART` `[p]`, as they were asked for.
        positions: int64: where each record goes.
        width: Bytes of a record.
        rows: uint8 `[n, taken]`: the first bytes of each record are put there.
        missing: uint8 `[n]`: becomes 1 where there is no record.
        stamps: int64 `[p]`: the stamps are put there.
    """

    parts: Parts
    positions: Int64
    width: int
    rows: UInt8
    missing: UInt8
    stamps: Int64


class RecordReplies(Replies):
    """Replies to reads of several tables; part numbers count through all of them."""

    def __init__(self, awaited: Sequence[Awaited], *, asking: bool = False) -> None:
        super().__init__()
        self._awaited, self._asking = list(awaited), asking
        self._before = 0  # parts of the tables that are done
        self._state = np.zeros(2, np.int64)
        self.done = not self._awaited

    def feed(self, received: UInt8, start: int, stop: int) -> int:
        while self._awaited:
            now = self._awaited[0]
            status, start = decode_records(
                received, start, stop, now.parts, now.positions, now.width, self._asking,
                now.rows.reshape(-1), now.rows.shape[1], now.missing, now.stamps, self._state,
            )  # fmt: skip
            self.completed = self._before + int(self._state[0])
            if status == UNEXPECTED:
                raise self._unexpected(received, start, stop)
            if status == DONE:
                del self._awaited[0]
                self._before += len(now.parts)
                self._state[:] = 0
            elif status == ERROR_LINE:
                line = _line_at(received, start, stop)
                if line is None:
                    return start
                self._fail(line)
                start += len(line) + 2
            else:
                return start
        self.done = True
        return start

    def _fail(self, line: bytes) -> None:
        self.failures.setdefault(self._before + int(self._state[0]), line[1:].decode(errors="replace"))
        # After a refused ASKING the reply to the command itself is still to come.
        refused_asking = self._asking and self._state[1] == 0
        self._state[:] = (self._state[0], 1) if refused_asking else (self._state[0] + 1, 0)

    def _unexpected(self, received: UInt8, start: int, stop: int) -> StoreFailed:
        now = self._awaited[0]
        got = received[start : min(stop, start + 40)].tobytes()
        return StoreFailed(
            f"a reply is not the {int(now.parts[self._state[0]]['rows'])} records of {now.width} bytes that were "
            f"asked for, it goes on with {got!r}"
        )


def _line_at(received: UInt8, start: int, stop: int) -> bytes | None:
    """The line at `start` without its CRLF; None if it has not all come.

    Raises:
        StoreFailed: it is too long to be an error.
    """
    text = received[start : min(stop, start + _LONGEST_LINE)].tobytes()
    line, crlf, _ = text.partition(b"\r\n")
    if not crlf and len(text) == _LONGEST_LINE:
        raise StoreFailed(f"a reply goes on with {text[:40]!r}, which is no reply to what was asked")
    return line if crlf else None


class WriteReplies(Replies):
    """Replies to writes: a line each.

    Attributes:
        lost: Parts that the server did not know any more when they were written.
    """

    def __init__(self, parts: Parts, *, asking: bool = False) -> None:
        super().__init__()
        self.lost: list[int] = []
        self._lines = [_line_kinds(gone > 0, asking) for gone in parts["gone"].tolist()]
        self._line = 0  # of the part
        self.done = not self._lines

    def feed(self, received: UInt8, start: int, stop: int) -> int:
        text = received[start:stop].tobytes()
        end = text.rfind(b"\r\n")
        if end < 0:
            return start
        for line in text[:end].split(b"\r\n"):
            self._take(line)
        return start + end + 2

    def _take(self, line: bytes) -> None:
        kinds = b"" if self.done else self._lines[self.completed]
        if line.startswith(b"-") and not self.done:
            self.failures.setdefault(self.completed, line[1:].decode(errors="replace"))
            # An EXEC that is refused has no results behind it.
            self._line = len(kinds) if kinds[self._line : self._line + 1] == b"*" else self._line + 1
        elif self.done or line[:1] != kinds[self._line : self._line + 1]:
            raise StoreFailed(f"a reply to a write is not one that was asked for, it goes on with {line[:40]!r}")
        else:
            if line == b":0" and self._line == kinds.find(b":"):  # the length of the stamp
                self.lost.append(self.completed)
            self._line += 1
        if self._line == len(kinds):
            self.completed += 1
            self._line = 0
            self.done = self.completed == len(self._lines)


def _line_kinds(gone: bool, asking: bool) -> bytes:
    """First characters of the lines that answer a write: HSTRLEN, then HSET, or MULTI, HDEL, HSET and EXEC."""
    ask = b"+" * asking
    return ask + b":" + ask + (b"+++*::" if gone else b":")


# The kernel that decodes replies of records, as far as they have come


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
