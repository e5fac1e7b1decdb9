"""Records in bulk as RESP2: requests framed at a fixed stride, and replies decoded as they arrive; no object per row.

A read, of `n` ids of a partition:

    HMGET <key> stamp (<id>) * n

A write of `n` records, after `m` ids are deleted; without these there is no MULTI and no EXEC, as one HSET is atomic:

    HSTRLEN <key> stamp   MULTI   HDEL <key> (<id>) * m   HSET <key> stamp <sequence> (<id> <record>) * n   EXEC

Behind the bytes of each record is its check, of these and of the id, 8 bytes: `check_of` of `native/record_checks`.

HSTRLEN tells whether the partition was still there. Where a node is asked out of turn (`-ASK`), an ASKING goes before
each of HMGET, HSTRLEN, MULTI and a HSET without MULTI.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import hiredis
import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.log.contract import Buffer
from elastable.embedding_store.native.intrinsics import copy_bytes, put_word, word_at
from elastable.embedding_store.native.kernel import inlined, kernel
from elastable.embedding_store.native.record_checks import check_of, record_key
from elastable.embedding_store.tiers.redis.connection import MORE_TO_COME, Replies, whole_replies
from elastable.embedding_store.tiers.redis.reply_shapes import Command, first_error, packed_command, require_shapes
from elastable.embedding_store.tiers.redis.schema import STAMP

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

_ASKING, _MULTI, _EXEC = (packed_command((name,)) for name in ("ASKING", "MULTI", "EXEC"))
_FRAMED_ID_BYTES = 14  # $8\r\n<id>\r\n
_LONGEST_HEADER = 24  # *<n>\r\n
_ID_HEAD = int.from_bytes(b"$8\r\n", "little")
_CR, _LF, _STAR, _MINUS, _ZERO = (ord(c) for c in "\r\n*-0")
CHECK_BYTES = 8
MISSING, DAMAGED = 1, 2  # of `PlacedRecords.missing`
_OTHER_BYTES = 320  # of a request and its reply, besides ids and records: about


def read_sizes(parts: Parts, width: int) -> Int64:
    """About how many bytes each read of records of `width` bytes moves, its reply included: int64 `[parts]`."""
    sizes: Int64 = parts["rows"] * (2 * _FRAMED_ID_BYTES + width + CHECK_BYTES) + _OTHER_BYTES
    return sizes


def write_sizes(parts: Parts, width: int) -> Int64:
    """About how many bytes each write of records of `width` bytes moves: int64 `[parts]`."""
    sizes: Int64 = read_sizes(parts, width) + parts["gone"] * _FRAMED_ID_BYTES
    return sizes


def _framed_word(word: bytes) -> bytes:
    """A word of a request."""
    return b"$%d\r\n%b\r\n" % (len(word), word)


def framed_ids(ids: Int64) -> memoryview:
    """Each id, int64 `[n]`, as a word of a request: uint8 `[n, 14]`."""
    framed = np.empty((len(ids), _FRAMED_ID_BYTES), np.uint8)
    _frame_ids(ids, framed.reshape(-1))
    return framed.data


@kernel
def _frame_ids(ids: Int64, framed: UInt8) -> None:
    for i in range(len(ids)):
        at = i * _FRAMED_ID_BYTES
        put_word(framed, at, _ID_HEAD)  # and 4 bytes that the id overwrites
        put_word(framed, at + 4, ids[i])
        framed[at + 12] = _CR
        framed[at + 13] = _LF


def framed_records(ids: Int64, positions: Int64, rows: UInt8) -> memoryview:
    """Each id, int64 `[n]`, and its record `rows[positions[i]]` as two words of a request: uint8 `[n, stride]`."""
    size = rows.shape[1] + CHECK_BYTES
    head = np.frombuffer(b"\r\n$%d\r\n" % size, np.uint8)  # with the end of the id
    framed = np.empty((len(ids), 12 + len(head) + size + 2), np.uint8)
    _frame_records(ids, positions, rows.reshape(-1), rows.shape[1], head, framed.reshape(-1))
    return framed.data


@kernel
def _frame_records(ids: Int64, positions: Int64, rows: UInt8, width: int, head: UInt8, framed: UInt8) -> None:
    at = 0
    for i in range(len(ids)):
        put_word(framed, at, _ID_HEAD)  # and 4 bytes that the id overwrites
        put_word(framed, at + 4, ids[i])
        copy_bytes(framed, at + 12, head, 0, len(head))
        at += 12 + len(head)
        copy_bytes(framed, at, rows, positions[i] * width, width)
        put_word(framed, at + width, _check(ids[i], framed, at, width))
        at += width + CHECK_BYTES
        framed[at] = _CR
        framed[at + 1] = _LF
        at += 2


@inlined
def _check(row_id: int, values: UInt8, at: int, width: int) -> np.uint64:
    """Of the record at `at`, behind which there is room for its check."""
    return check_of(values, at, width, record_key(row_id, 0))


@kernel
def damaged_records(ids: Int64, values: UInt8, width: int) -> Int64:
    """Indices of records, each `width` bytes and its check in uint8 `values`, that are not those of their ids."""
    found, count = np.empty(len(ids), np.int64), 0
    for i in range(len(ids)):
        at = i * (width + CHECK_BYTES)
        if word_at(values, at + width) != _check(ids[i], values, at, width):
            found[count] = i
            count += 1
    return found[:count]


@dataclass(frozen=True, slots=True)
class ReadWords:
    """The words of each partition's read up to its ids: those of partition p are `text[ends[p]:ends[p + 1]]`.

    Attributes:
        text: uint8.
        ends: int64 `[partitions + 1]`.
    """

    text: UInt8
    ends: Int64

    @classmethod
    def of(cls, keys: Sequence[bytes]) -> Self:
        """Of partitions with these keys."""
        words = [b"".join(map(_framed_word, (b"HMGET", key, STAMP))) for key in keys]
        return cls(np.frombuffer(b"".join(words), np.uint8), np.cumsum([0, *map(len, words)]))


def encoded_reads(parts: Parts, words: ReadWords, ids: Int64, asking: bool) -> memoryview:
    """The reads of some partitions.

    Args:
        parts: `PART` `[p]`; a part reads `ids[row_at:row_at + rows]`.
        words: Of the table's partitions.
        ids: int64.
        asking: An ASKING goes before each.
    """
    most = len(parts) * (len(_ASKING) + _LONGEST_HEADER) + np.diff(words.ends)[parts["partition"]].sum()
    encoded = np.empty(most + parts["rows"].sum() * _FRAMED_ID_BYTES, np.uint8)
    ask = np.frombuffer(_ASKING * asking, np.uint8)
    return encoded[: _encode_reads(parts, words.text, words.ends, ids, ask, encoded)].data


@kernel
def _encode_reads(parts: Parts, text: UInt8, ends: Int64, ids: Int64, ask: UInt8, encoded: UInt8) -> int:
    """The bytes that it took."""
    at = 0
    for p in range(len(parts)):
        part = parts[p]
        copy_bytes(encoded, at, ask, 0, len(ask))
        at += len(ask)
        count, power = part["rows"] + 3, 1
        while power * 10 <= count:
            power *= 10
        encoded[at] = _STAR
        at += 1
        while power:
            encoded[at] = _ZERO + count // power % 10
            at += 1
            power //= 10
        encoded[at] = _CR
        encoded[at + 1] = _LF
        first, behind = ends[part["partition"]], ends[part["partition"] + 1]
        copy_bytes(encoded, at + 2, text, first, behind - first)
        at += 2 + behind - first
        rows = part["rows"]
        _frame_ids(ids[part["row_at"] : part["row_at"] + rows], encoded[at : at + rows * _FRAMED_ID_BYTES])
        at += rows * _FRAMED_ID_BYTES
    return at


def encoded_write(key: bytes, records: memoryview, gone: Buffer, stamp: bytes, asking: bool) -> list[Buffer]:
    """The write of some records of one partition, in pieces.

    Args:
        key: Of the partition.
        records: By `framed_records`.
        gone: Ids to delete before, by `framed_ids`.
        stamp: The new one of the partition, 8 bytes.
        asking: An ASKING goes before what needs one.
    """
    ask, key = _ASKING * asking, _framed_word(key)
    start = b"%b*3\r\n$7\r\nHSTRLEN\r\n%b$5\r\nstamp\r\n%b" % (ask, key, ask)
    head = b"*%d\r\n$4\r\nHSET\r\n%b$5\r\nstamp\r\n$8\r\n%b\r\n" % (4 + 2 * len(records), key, stamp)
    if not len(gone):
        return [start + head, records]
    return [b"%b%b*%d\r\n$4\r\nHDEL\r\n%b" % (start, _MULTI, 2 + len(gone), key), gone, head, records, _EXEC]


# Replies to these requests


_LONGEST_LINE = 65_536


@dataclass(frozen=True, slots=True)
class PlacedRecords:
    """Records of one table to read or to write, by partition.

    Attributes:
        ids: int64 `[n]`: whose each record is, those of partition 0 first.
        positions: int64 `[n]`: the record of `ids[i]` is `rows[positions[i]]`.
        width: Bytes of a record, without its check.
        rows: uint8 `[n, w]`: whole records to write; or, to be read, their first bytes.
        missing: uint8 `[n]`, of a read: becomes `MISSING` where there is no record, `DAMAGED` where it fails its check,
            else 0.
    """

    ids: Int64
    positions: Int64
    width: int
    rows: UInt8
    missing: UInt8


class RecordReplies(Replies):
    """Replies to reads of several tables; part numbers count through all of them.

    Attributes:
        stamps: int64 `[parts]`; `NO_STAMP` where there is none, or none has come.
    """

    def __init__(self, awaited: Sequence[tuple[PlacedRecords, Parts]], *, asking: bool = False) -> None:
        """`awaited`: of each table its records, and the parts that were asked for."""
        super().__init__()
        self.stamps = np.full(sum(len(parts) for _, parts in awaited), NO_STAMP, np.int64)
        self._awaited, self._asking = list(awaited), asking
        self._before = 0  # parts of the tables that are done
        self._state = np.array([0, -asking])
        self.done = not self._awaited

    def feed(self, received: UInt8, start: int, stop: int) -> int:
        while self._awaited:
            now, parts = self._awaited[0]
            status, start = decode_records(
                received, start, stop, parts, now.ids, now.positions, now.width, self._asking,
                _padded(b"$%d\r\n" % (now.width + CHECK_BYTES)), now.rows.reshape(-1), now.rows.shape[1], now.missing,
                self.stamps[self._before :], self._state,
            )  # fmt: skip
            self.completed = self._before + int(self._state[0])
            if status == UNEXPECTED:
                raise self._unexpected(received, start, stop)
            if status == DONE:
                del self._awaited[0]
                self._before += len(parts)
                self._state[:] = 0, -self._asking
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
        part, step = self._state.tolist()
        self.failures.setdefault(self._before + part, line[1:].decode(errors="replace"))
        # After a refused ASKING the reply to the command itself is still to come.
        self._state[:] = (part, 0) if step < 0 else (part + 1, -self._asking)

    def _unexpected(self, received: UInt8, start: int, stop: int) -> StoreFailed:
        now, parts = self._awaited[0]
        got = received[start : min(stop, start + 40)].tobytes()
        return StoreFailed(
            f"a reply is not the {int(parts[self._state[0]]['rows'])} records of {now.width} bytes that were "
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
    """Replies to writes.

    Attributes:
        lost: Parts that the server did not know any more when they were written.
    """

    def __init__(self, parts: Parts, server: object, *, asking: bool = False) -> None:
        """`server`: for messages."""
        super().__init__()
        self.lost: list[int] = []
        self._server, self._reader, self._replies = server, hiredis.Reader(notEnoughData=MORE_TO_COME), list[object]()
        self._commands = [_commands_of_write(gone > 0, asking) for gone in parts["gone"].tolist()]
        self._taken = 0  # of the replies
        self.done = not self._commands

    def feed(self, received: UInt8, start: int, stop: int) -> int:
        self._reader.feed(received[start:stop].tobytes())
        self._replies += whole_replies(self._reader, self._server)
        while not self.done and len(self._replies) - self._taken >= len(self._commands[self.completed]):
            self._take(self._commands[self.completed])
        if self.done and self._taken < len(self._replies):
            raise StoreFailed(f"redis at {self._server} sent more than it was asked for")
        return stop

    def _take(self, commands: Sequence[Command]) -> None:
        replies = self._replies[self._taken : self._taken + len(commands)]
        match replies:
            case [int(length), int(new)] if commands is _PLAIN and length > 0 <= new:
                pass
            case _:
                self._look(commands, replies)
        self._taken += len(commands)
        self.completed += 1
        self.done = self.completed == len(self._commands)

    def _look(self, commands: Sequence[Command], replies: Sequence[object]) -> None:
        require_shapes(commands, replies, self._server)
        if (error := first_error(replies)) is not None:
            self.failures[self.completed] = error
        if replies[commands.index(_STAMP_LENGTH)] == 0:
            self.lost.append(self.completed)


_STAMP_LENGTH: Command = ("HSTRLEN",)
_PLAIN: list[Command] = [_STAMP_LENGTH, ("HSET",)]


def _commands_of_write(gone: bool, asking: bool) -> list[Command]:
    """By name, those that `encoded_write` sends."""
    if not gone and not asking:
        return _PLAIN
    ask: list[Command] = [("ASKING",)] * asking
    changed: list[Command] = [("MULTI",), ("HDEL",), ("HSET",), ("EXEC",)] if gone else [("HSET",)]
    return [*ask, _STAMP_LENGTH, *ask, *changed]


# The kernel that decodes replies of records, as far as they have come


NO_STAMP = -1

# What `decode_records` stopped for, and what a place below 0 means in its callees.
DONE, MORE, ERROR_LINE, UNEXPECTED = 0, -1, -2, -3

_CRLF = np.uint64(_CR + (_LF << 8))


def _padded(text: bytes) -> UInt8:
    return np.frombuffer(text.ljust(24, b"\0"), np.uint8)


_OK, _NIL, _STAMP_HEAD, _LINE_END = (_padded(text) for text in (b"+OK\r\n", b"$-1\r\n", b"$8\r\n", b"\r\n"))


@kernel
def _behind(text: UInt8, received: UInt8, at: int, stop: int) -> int:
    """The place behind the text at `at`. It ends before its first 0."""
    for byte in text:
        if byte == 0:
            break
        if at >= stop:
            return MORE
        if received[at] != byte:
            return UNEXPECTED
        at += 1
    return at


@kernel
def _behind_header(elements: int, received: UInt8, at: int, stop: int) -> int:
    """The place behind the `*<elements>\\r\\n` at `at`."""
    power = 1
    while power * 10 <= elements:
        power *= 10
    if at >= stop:
        return MORE
    if received[at] != _STAR:
        return UNEXPECTED
    at += 1
    while power:
        if at >= stop:
            return MORE
        if received[at] != _ZERO + elements // power % 10:
            return UNEXPECTED
        at += 1
        power //= 10
    return _behind(_LINE_END, received, at, stop)


@kernel
def _find_bulk(head: UInt8, width: int, received: UInt8, at: int, stop: int) -> tuple[int, int]:
    """(first byte, place behind) of a bulk string of `width` bytes, which `head` begins; first byte -1: nil."""
    first = _behind(head, received, at, stop)
    if first == UNEXPECTED:
        return -1, _behind(_NIL, received, at, stop)
    if first < 0 or first + width + 2 > stop:
        return 0, MORE
    if received[first + width] != _CR or received[first + width + 1] != _LF:
        return 0, UNEXPECTED
    return first, first + width + 2


@kernel
def _word_of(head: UInt8) -> tuple[int, int, int]:
    """The text as a word, the bits that count in it, and its bytes; 0: it takes more."""
    size = 0
    while head[size]:
        size += 1
    if size > 8:
        size = 0
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - 8 * max(size, 1))
    return word_at(head, 0), mask, size  # type: ignore[return-value]  # uint64 inside the kernel


@kernel
def decode_records(
    received: UInt8, start: int, stop: int, parts: Parts, ids: Int64, positions: Int64, width: int, asking: bool,
    head: UInt8, rows: UInt8, taken: int, missing: UInt8, stamps: Int64, state: Int64,
) -> tuple[int, int]:  # fmt: skip
    """Decodes as far as it can: (status, place of the first byte left).

    Args:
        received: What has come, from `start` to `stop`.
        start, stop: Places in it.
        parts: `PART` `[p]`, as they were asked for.
        ids: int64: of the records.
        positions: int64: record i of all parts goes to `rows[positions[i]]`.
        width: Bytes of a record, without its check.
        asking: Whether an ASKING went before each part.
        head: uint8 `[24]`: what begins each record, and zeros.
        rows: uint8, `taken` bytes each.
        taken: Bytes that are kept of each record.
        missing: uint8, as of `PlacedRecords`, by position.
        stamps: int64 `[p]` or more; `NO_STAMP` where there is none.
        state: int64 `[2]`: the part, 0 at first, and the step within its reply (-1: the reply to ASKING, 0: the header,
            1 and up: bulk strings).
    """
    at, whole = start, width + CHECK_BYTES
    word, mask, size = _word_of(head)
    while state[0] < len(parts):
        part = parts[state[0]]
        while state[1] < 1:
            if at < stop and received[at] == _MINUS:
                return ERROR_LINE, at
            if state[1] < 0:
                behind = _behind(_OK, received, at, stop)
            else:
                behind = _behind_header(part["rows"] + 1, received, at, stop)
            if behind < 0:
                return behind, at
            at = behind
            state[1] += 1
        if state[1] == 1:
            first, behind = _find_bulk(_STAMP_HEAD, 8, received, at, stop)
            if behind < 0:
                return behind, at
            stamps[state[0]] = NO_STAMP if first < 0 else np.int64(word_at(received, first))
            at = behind
            state[1] = 2
        for row in range(part["row_at"] + state[1] - 2, part["row_at"] + part["rows"]):
            # Of a usual record that is all there two words are compared: they hold its head and its end.
            first, behind = at + size, at + size + whole + 2
            usual = size and behind <= stop and word_at(received, at) & mask == word
            if not usual or word_at(received, behind - 8) >> np.uint64(48) != _CRLF:
                first, behind = _find_bulk(head, whole, received, at, stop)
                if behind < 0:
                    return behind, at
            position = positions[row]
            missing[position] = MISSING if first < 0 else 0
            if first >= 0:
                if word_at(received, first + width) != _check(ids[row], received, first, width):
                    missing[position] = DAMAGED
                copy_bytes(rows, position * taken, received, first, taken)
            at = behind
            state[1] += 1
        state[0] += 1
        state[1] = -1 if asking else 0
    return DONE, at
