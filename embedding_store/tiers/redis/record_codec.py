"""Records in bulk as RESP2: requests of fixed-stride bytes, and replies decoded as they arrive; no object per row.

A read, of `n` ids of a partition:

    HMGET <key> stamp (<id>) * n

A write of `n` records, after `m` ids are deleted; without these there is no MULTI and no EXEC, as one HSET is atomic:

    HSTRLEN <key> stamp   MULTI   HDEL <key> (<id>) * m   HSET <key> stamp <sequence> (<id> <record>) * n   EXEC

HSTRLEN tells whether the partition was still there. Where a node is asked out of turn (`-ASK`), an ASKING goes before
each of HMGET, HSTRLEN, MULTI and a HSET without MULTI.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.native.intrinsics import copy_bytes, put_word, word_at
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.tiers.redis.connection import Replies

Parts = npt.NDArray[np.void]

#: What a batch has to do with one partition. Offsets count from 0.
PART = np.dtype(
    [
        ("partition", np.int64),
        ("row_at", np.int64),  # where its ids begin in `ids` and `positions`
        ("rows", np.int64),  # how many ids are read or written
        ("gone_at", np.int64),  # where the ids to delete begin
        ("gone", np.int64),  # how many
    ]
)


@dataclass(frozen=True, slots=True)
class Keys:
    """Encoded keys side by side: key k is `text[at[k]:at[k + 1]]`, a whole `$<L>\\r\\n<key>\\r\\n`.

    Attributes:
        text: uint8.
        at: int64 `[keys + 1]`.
    """

    text: UInt8
    at: Int64

    @classmethod
    def of(cls, keys: list[bytes]) -> "Keys":
        """Encodes the keys, in order."""
        encoded = [b"$%d\r\n%s\r\n" % (len(key), key) for key in keys]
        at = np.zeros(len(keys) + 1, np.int64)
        np.cumsum([len(key) for key in encoded], out=at[1:])
        return cls(np.frombuffer(b"".join(encoded), np.uint8), at)


_ASKING = np.frombuffer(b"*1\r\n$6\r\nASKING\r\n", np.uint8)
_MULTI = np.frombuffer(b"*1\r\n$5\r\nMULTI\r\n", np.uint8)
_EXEC = np.frombuffer(b"*1\r\n$4\r\nEXEC\r\n", np.uint8)
_HMGET = np.frombuffer(b"$5\r\nHMGET\r\n", np.uint8)
_HSET = np.frombuffer(b"$4\r\nHSET\r\n", np.uint8)
_HDEL = np.frombuffer(b"$4\r\nHDEL\r\n", np.uint8)
_HSTRLEN = np.frombuffer(b"*3\r\n$7\r\nHSTRLEN\r\n", np.uint8)
_STAMP = np.frombuffer(b"$5\r\nstamp\r\n", np.uint8)

_ID_BYTES = 14  # $8\r\n<8>\r\n
_LARGEST_HEADER = 24  # *<n>\r\n or $<n>\r\n
_FRAME_BYTES = (
    320  # of one partition, without keys, ids and records: headers, names, stamp; words are put beyond the end
)
_MOST_KEYS = 3  # a write names its key so many times


def read_sizes(parts: Parts, keys: Keys) -> Int64:
    """Upper bound of the encoded bytes of each read: int64 `[parts]`."""
    return cast(Int64, _key_bytes(parts, keys) + parts["rows"] * _ID_BYTES + _FRAME_BYTES)


def reply_sizes(parts: Parts, width: int) -> Int64:
    """Upper bound of the bytes of the reply to each read of records of `width` bytes: int64 `[parts]`."""
    return cast(Int64, (width + _LARGEST_HEADER) * parts["rows"] + _FRAME_BYTES)


def write_sizes(parts: Parts, keys: Keys, width: int) -> Int64:
    """Upper bound of the encoded bytes of each write: int64 `[parts]`."""
    rows = parts["rows"] * (width + _ID_BYTES + _LARGEST_HEADER) + parts["gone"] * _ID_BYTES
    return cast(Int64, _MOST_KEYS * _key_bytes(parts, keys) + rows + _FRAME_BYTES)


def _key_bytes(parts: Parts, keys: Keys) -> Int64:
    return cast(Int64, keys.at[parts["partition"] + 1] - keys.at[parts["partition"]])


@kernel
def _header_word(width: int, before: int) -> tuple[int, int]:
    """`$<width>\\r\\n`, after a `\\r\\n` of `before` bytes (2 or 0), as a word and its size; size 0: it takes more."""
    header = np.empty(32, np.uint8)
    header[0], header[1] = 13, 10
    size = put_header(header, before, 36, width)
    word = np.uint64(0)
    for i in range(min(size, 8)):
        word |= np.uint64(header[i]) << np.uint64(8 * i)
    return word, (size if size <= 8 else 0)  # type: ignore[return-value]  # uint64 inside the kernel


@kernel
def _put_records(part: np.void, ids: Int64, positions: Int64, rows: UInt8, width: int, out: UInt8, at: int) -> int:
    """`$8\\r\\n<id>\\r\\n$<W>\\r\\n<record>\\r\\n` for every record of the part."""
    word, size = _header_word(width, 2)
    for row in range(part["row_at"], part["row_at"] + part["rows"]):
        put_word(out, at, INT64_HEADER)
        put_word(out, at + 4, ids[row])
        put_word(out, at + 12, word)
        at = at + 12 + size if size else put_header(out, at + 14, 36, width)
        copy_bytes(out, at, rows, positions[row] * width, width)
        out[at + width] = 13
        out[at + width + 1] = 10
        at += width + 2
    return at


@kernel
def encode_reads(parts: Parts, text: UInt8, key_at: Int64, ids: Int64, asking: bool, out: UInt8, at: int) -> int:
    """Puts the reads of some partitions into `out` from `at` on; returns the place behind them.

    Args:
        parts: `PART` `[p]`.
        text, key_at: `Keys` of the table's partitions.
        ids: int64; a part reads `ids[row_at:row_at + rows]`.
        asking: An ASKING goes before each.
        out: uint8, with room for `read_sizes`.
        at: Where to begin.
    """
    for c in range(len(parts)):
        part = parts[c]
        if asking:
            at = put_text(out, at, _ASKING)
        at = put_header(out, at, 42, 3 + part["rows"])
        at = put_text(out, at, _HMGET)
        at = put_text(out, at, text[key_at[part["partition"]] : key_at[part["partition"] + 1]])
        at = put_text(out, at, _STAMP)
        for row in range(part["row_at"], part["row_at"] + part["rows"]):
            at = put_int64(out, at, ids[row])
    return at


@kernel
def encode_writes(
    parts: Parts, text: UInt8, key_at: Int64, ids: Int64, positions: Int64, gone: Int64, rows: UInt8, width: int,
    sequence: int, asking: bool, out: UInt8, at: int,
) -> int:  # fmt: skip
    """Puts the writes of some partitions into `out` from `at` on; returns the place behind them.

    Args:
        parts: `PART` `[p]`.
        text, key_at: `Keys` of the table's partitions.
        ids: int64; a part writes `ids[row_at:row_at + rows]`.
        positions: int64: the record of `ids[i]` is `rows[positions[i] * width:]`.
        gone: int64; a part deletes `gone[gone_at:gone_at + gone]`.
        rows: uint8, records of `width` bytes.
        sequence: The partitions' new stamp.
        asking: An ASKING goes before what needs one.
        out: uint8, with room for `write_sizes`.
        at: Where to begin.
    """
    for c in range(len(parts)):
        part = parts[c]
        key = text[key_at[part["partition"]] : key_at[part["partition"] + 1]]
        if asking:
            at = put_text(out, at, _ASKING)
        at = put_text(out, at, _HSTRLEN)
        at = put_text(out, at, key)
        at = put_text(out, at, _STAMP)
        if asking:
            at = put_text(out, at, _ASKING)
        if part["gone"]:
            at = put_text(out, at, _MULTI)
            at = put_header(out, at, 42, 2 + part["gone"])
            at = put_text(out, at, _HDEL)
            at = put_text(out, at, key)
            for row in range(part["gone_at"], part["gone_at"] + part["gone"]):
                at = put_int64(out, at, gone[row])
        at = put_header(out, at, 42, 4 + 2 * part["rows"])
        at = put_text(out, at, _HSET)
        at = put_text(out, at, key)
        at = put_text(out, at, _STAMP)
        at = put_int64(out, at, sequence)
        at = _put_records(part, ids, positions, rows, width, out, at)
        if part["gone"]:
            at = put_text(out, at, _EXEC)
    return at


# Words of RESP2 in a buffer: texts, headers and numbers, for the kernels that encode requests


# As they lie in little-endian words.
INT64_HEADER = int.from_bytes(b"$8\r\n", "little")
_CRLF = int.from_bytes(b"\r\n", "little")


@kernel
def put_text(out: UInt8, at: int, text: UInt8) -> int:
    for i in range(len(text)):
        out[at + i] = text[i]
    return at + len(text)


@kernel
def put_header(out: UInt8, at: int, kind: int, number: int) -> int:
    """`<kind><number>\\r\\n`."""
    out[at] = kind
    digits = 1
    power = 10
    while number >= power:
        digits += 1
        power *= 10
    rest = number
    for i in range(digits):
        out[at + digits - i] = 48 + rest % 10
        rest //= 10
    out[at + digits + 1] = 13
    out[at + digits + 2] = 10
    return at + digits + 3


@kernel
def put_int64(out: UInt8, at: int, value: int) -> int:
    """`$8\\r\\n<value, little-endian>\\r\\n`, and rubbish in the 6 bytes behind it."""
    put_word(out, at, INT64_HEADER)
    put_word(out, at + 4, value)
    put_word(out, at + 12, _CRLF)
    return at + 14


# Replies to these requests


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
def _copy_usual_records(
    received: UInt8, start: int, stop: int, part: np.void, first: int, positions: Int64, width: int,
    rows: UInt8, taken: int, missing: UInt8,
) -> tuple[int, int]:  # fmt: skip
    """Copies records from number `first` of the part on, while they are whole and there: (records, place behind)."""
    word, size = _header_word(width, 0)
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - 8 * max(size, 1))
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
                stamps[state[0]] = NO_STAMP if first < 0 else np.int64(word_at(received, first))
            else:
                position = positions[part["row_at"] + row]
                missing[position] = first < 0
                if first >= 0:
                    copy_bytes(rows, position * taken, received, first, taken)
            element += 1
        state[0] += 1
        state[1] = 0
    return DONE, at
