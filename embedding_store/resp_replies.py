"""Replies to `embedding_store.resp_codec`'s requests, decoded as they arrive.

A reader of replies is fed whatever bytes have come and keeps its place between
feeds. An error that the server answers to a command is kept beside that
command, never turned into a value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from embedding_store.errors import StoreFailed
from embedding_store.kernel import kernel
from embedding_store.memory_copy import copy_bytes
from embedding_store.resp_codec import NO_STAMP, Bytes, Commands
from embedding_store.store import Int64

__all__ = ["ChangeReplies", "Replies", "RowReplies"]

# What `_decode_rows` stopped for, and what a place below 0 means in its callees.
_DONE, _MORE, _ERROR_LINE, _UNEXPECTED = 0, -1, -2, -3

_CR, _LF, _STAR, _PLUS, _MINUS, _DOLLAR, _ZERO, _NINE = (ord(c) for c in "\r\n*+-$09")
_NIL_BYTES = 5  # $-1\r\n, as long as +OK\r\n and the shortest of all elements


@kernel
def _read_number(received: Bytes, start: int, stop: int) -> tuple[int, int]:
    """(number, place behind it) of `<kind><number>\\r\\n` at `start`."""
    at = start + 1
    number = 0
    while at < stop and _ZERO <= received[at] <= _NINE and at - start < 19:
        number = number * 10 + (received[at] - _ZERO)
        at += 1
    if at < stop and (received[at] != _CR or at == start + 1):
        return 0, _UNEXPECTED
    if at + 2 > stop:
        return 0, _MORE
    if received[at + 1] != _LF:
        return 0, _UNEXPECTED
    return number, at + 2


@kernel
def _find_bulk(received: Bytes, start: int, stop: int, width: int) -> tuple[int, int]:
    """(first byte, place behind) of a bulk string of `width` bytes at `start`; first byte -1: nil."""
    if stop - start < _NIL_BYTES:
        return 0, _MORE
    if received[start] != _DOLLAR:
        return 0, _UNEXPECTED
    if received[start + 1] == _MINUS:
        nil = received[start + 2] == _ZERO + 1 and received[start + 3] == _CR and received[start + 4] == _LF
        return -1, (start + _NIL_BYTES if nil else _UNEXPECTED)
    number, first = _read_number(received, start, stop)
    if first < 0 or number != width:
        return 0, (first if first < 0 else _UNEXPECTED)
    if stop - first < width + 2:
        return 0, _MORE
    if received[first + width] != _CR or received[first + width + 1] != _LF:
        return 0, _UNEXPECTED
    return first, first + width + 2


@kernel
def _find_header(received: Bytes, start: int, stop: int, elements: int) -> int:
    """Place behind the `*<elements>\\r\\n` at `start`; elements -1: behind an `+OK\\r\\n`."""
    if start >= stop:
        return _MORE
    if received[start] == _MINUS:
        return _ERROR_LINE
    if elements < 0:
        if received[start] != _PLUS:
            return _UNEXPECTED
        return start + _NIL_BYTES if stop - start >= _NIL_BYTES else _MORE
    if received[start] != _STAR:
        return _UNEXPECTED
    number, behind = _read_number(received, start, stop)
    return behind if behind < 0 or number == elements else _UNEXPECTED


@kernel
def _int64_at(received: Bytes, first: int) -> int:
    bits = np.uint64(0)
    for i in range(8):
        bits |= np.uint64(received[first + i]) << np.uint64(8 * i)
    return np.int64(bits)  # type: ignore[return-value]  # an int64 inside the kernel


@kernel
def _decode_rows(
    received: Bytes, start: int, stop: int, commands: Commands, positions: Int64, asking: bool,
    block: Bytes, missing: Bytes, stamps: Int64, state: Int64,
) -> tuple[int, int]:  # fmt: skip
    """Decodes as far as it can: (status, place of the first byte left).

    `state` is int64 `[2]`, zeros at first: the command, and the step within its
    reply (0: the reply to ASKING, 1: the header, 2 and up: bulk strings).
    """
    at = start
    while state[0] < len(commands):
        command = commands[state[0]]
        stamped = command["stamped"]
        elements = command["rows"] + stamped
        for step in range(0 if asking else 1, 2):
            if state[1] <= step:
                behind = _find_header(received, at, stop, elements if step else -1)
                if behind < 0:
                    return behind, at
                at = behind
                state[1] = step + 1
        for element in range(state[1] - 2, elements):
            state[1] = element + 2
            row = element - stamped
            width = 8 if row < 0 else command["width"]
            first, behind = _find_bulk(received, at, stop, width)
            if behind < 0:
                return behind, at
            at = behind
            if row < 0:
                stamps[state[0]] = NO_STAMP if first < 0 else _int64_at(received, first)
                continue
            position = positions[command["row_at"] + row]
            missing[command["flag_at"] + position] = first < 0
            target = command["block_at"] + position * width
            if first >= 0:
                copy_bytes(block, target, received, first, width)
        state[0] += 1
        state[1] = 0
    return _DONE, at


class Replies(ABC):
    """Replies that are still to come on one connection.

    Attributes:
        failures: Command -> the error line that the server answered, without
            its `-`. Command -1 is the question for the version.
        done: All replies have come.
    """

    def __init__(self) -> None:
        self.failures: dict[int, str] = {}
        self.done = False

    @abstractmethod
    def feed(self, received: Bytes, start: int, stop: int) -> int:
        """Decodes what it can of `received[start:stop]`; returns the place of the first byte left.

        Raises:
            StoreFailed: the bytes are no reply to what was asked.
        """


class RowReplies(Replies):
    """Replies to `encode_reads`, with that to a GET of the version before them if it was asked.

    Attributes:
        stamps: int64 `[commands]`; `NO_STAMP` where there is none.
        version: That the server answered; 0 where the key does not exist.
    """

    def __init__(
        self,
        commands: Commands,
        positions: Int64,
        block: Bytes,
        missing: Bytes,
        *,
        asks_version: bool = False,
        asking: bool = False,
    ) -> None:
        """Rows go to `block`, at `block_at + position * width`; `missing[flag_at + position]` becomes 1 or 0."""
        super().__init__()
        self.stamps = np.full(len(commands), NO_STAMP, np.int64)
        self.version = 0
        self._asks_version = asks_version
        self._commands = commands
        self._asking = asking
        self._positions, self._block, self._missing = positions, block, missing
        self._state = np.zeros(2, np.int64)

    def feed(self, received: Bytes, start: int, stop: int) -> int:
        if self._asks_version:
            behind = self._read_version(received, start, stop)
            if behind < 0:
                return start
            start = behind
            self._asks_version = False
        while True:
            status, start = _decode_rows(
                received, start, stop, self._commands, self._positions, self._asking,
                self._block, self._missing, self.stamps, self._state,
            )  # fmt: skip
            if status == _UNEXPECTED:
                raise self._unexpected(received, start, stop)
            if status != _ERROR_LINE:
                self.done = status == _DONE
                return start
            line = _line_at(received, start, stop)
            if line is None:
                return start
            self.failures.setdefault(int(self._state[0]), line[1:].decode(errors="replace"))
            # After a refused ASKING the reply to the command itself is still to come.
            refused_asking = self._asking and self._state[1] == 0
            self._state[:] = (self._state[0], 1) if refused_asking else (self._state[0] + 1, 0)
            start += len(line) + 2

    def _read_version(self, received: Bytes, start: int, stop: int) -> int:
        """Place behind the version at `start`, -1 if it has not all come."""
        lines: list[bytes] = []
        # The reply to an ASKING, the length or an error, the digits.
        for _ in range(2 + self._asking):
            line = _line_at(received, start, stop)
            if line is None:
                return -1
            lines.append(line)
            start += len(line) + 2
            if line.startswith(b"-") and len(lines) > self._asking:
                self.failures[-1] = line[1:].decode(errors="replace")
                return start
            if line == b"$-1":
                return start
        try:
            self.version = int(lines[-1])
        except ValueError:
            raise StoreFailed(f"the version key holds {lines[-1][:60]!r}, which is no version") from None
        return start

    def _unexpected(self, received: Bytes, start: int, stop: int) -> StoreFailed:
        command = self._commands[self._state[0]]
        got = received[start : min(stop, start + 40)].tobytes()
        return StoreFailed(
            f"a reply is not the {int(command['rows'])} rows of {int(command['width'])} bytes that were asked for, "
            f"it goes on with {got!r}"
        )


class ChangeReplies(Replies):
    """Replies to `encode_writes`."""

    def __init__(self, queued: Int64, *, asking: bool = False) -> None:
        """`queued` is int64 `[changes]`: the commands between MULTI and EXEC of each."""
        super().__init__()
        self._queued = queued
        self._asking = asking
        self._change = 0
        self._line = 0  # of the change: MULTI and what goes before it, commands, EXEC
        self._results = 0  # lines of an EXEC's array still to come
        self.done = len(queued) == 0

    def feed(self, received: Bytes, start: int, stop: int) -> int:
        text = received[start:stop].tobytes()
        end = text.rfind(b"\r\n")
        if end < 0:
            return start
        for line in text[:end].split(b"\r\n"):
            self._take(line)
        return start + end + 2

    def _take(self, line: bytes) -> None:
        if self.done or line[:1] not in (b"+", b"-", b":", b"*"):
            raise StoreFailed(f"a reply to a commit is not one that was asked for, it goes on with {line[:40]!r}")
        if line.startswith(b"-"):
            self.failures.setdefault(self._change, line[1:].decode(errors="replace"))
        if self._results:
            self._results -= 1
            if not self._results:
                self._next_change()
            return
        before_exec = 1 + self._asking + int(self._queued[self._change])
        self._line += 1
        if self._line <= before_exec:
            return
        if line.startswith(b"*") and line[1:].isdigit() and int(line[1:]) == self._queued[self._change]:
            self._results = int(line[1:])
            return
        if not line.startswith(b"-"):
            self.failures.setdefault(self._change, f"EXEC answered {line[:40].decode(errors='replace')}")
        self._next_change()

    def _next_change(self) -> None:
        self._change += 1
        self._line = 0
        self.done = self._change == len(self._queued)


def _line_at(received: Bytes, start: int, stop: int) -> bytes | None:
    """The line at `start` without its CRLF; None if it has not all come.

    Raises:
        StoreFailed: it is too long to be an error or a number.
    """
    text = received[start : min(stop, start + 65_536)].tobytes()
    line, crlf, _ = text.partition(b"\r\n")
    if not crlf and len(text) == 65_536:
        raise StoreFailed(f"a reply goes on with {text[:40]!r}, which is no reply to what was asked")
    return line if crlf else None
