"""Replies to the requests of `record_requests`, decoded as they arrive.

A reader of replies is fed whatever bytes have come and keeps its place between
feeds. An error that the server answers is kept beside the part that it answers,
never turned into a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.tiers.redis.connections.exchange import Replies
from elastable.embedding_store.tiers.redis.records.record_decoder import DONE, ERROR_LINE, UNEXPECTED, decode_records
from elastable.embedding_store.tiers.redis.records.record_requests import Parts

__all__ = ["Awaited", "RecordReplies", "WriteReplies"]

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
