"""Replies to `elastable.embedding_store.tiers.redis.resp_codec`'s requests, decoded as they arrive.

A reader of replies is fed whatever bytes have come and keeps its place between
feeds. An error that the server answers to a command is kept beside that
command, never turned into a value.
"""

from __future__ import annotations

import hiredis
import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.tiers.redis.exchange import Replies
from elastable.embedding_store.tiers.redis.resp_answers import line_at, parse_answer
from elastable.embedding_store.tiers.redis.resp_codec import NO_STAMP, Bytes, Commands
from elastable.embedding_store.tiers.redis.resp_decoder import DONE, ERROR_LINE, UNEXPECTED, decode_rows

__all__ = ["ChangeReplies", "RowReplies"]


class RowReplies(Replies):
    """Replies to `block_encode_reads`, after those to some questions that were asked before.

    Attributes:
        stamps: int64 `[commands]`; `NO_STAMP` where there is none.
        answers: To the questions, in order.
    """

    def __init__(
        self,
        commands: Commands,
        positions: Int64,
        block: Bytes,
        missing: Bytes,
        *,
        questions: int = 0,
        asking: bool = False,
    ) -> None:
        """Rows go to `block`, at `block_at + position * width`; `missing[flag_at + position]` becomes 1 or 0."""
        super().__init__()
        self.stamps = np.full(len(commands), NO_STAMP, np.int64)
        self.answers: list[object] = []
        self._to_come = questions * (1 + asking)
        self._commands = commands
        self._asking = asking
        self._positions, self._block, self._missing = positions, block, missing
        self._state = np.zeros(2, np.int64)

    def feed(self, received: Bytes, start: int, stop: int) -> int:
        while self._to_come:
            found = parse_answer(received, start, stop)
            if found is None:
                return start
            answer, start = found
            self._to_come -= 1
            if isinstance(answer, hiredis.ReplyError):
                self.failures.setdefault(-1, str(answer))
            if not (self._asking and self._to_come % 2):  # that was the reply to an ASKING
                self.answers.append(answer)
        while True:
            status, start = decode_rows(
                received, start, stop, self._commands, self._positions, self._asking,
                self._block, self._missing, self.stamps, self._state,
            )  # fmt: skip
            if status == UNEXPECTED:
                raise self._unexpected(received, start, stop)
            if status != ERROR_LINE:
                self.completed = int(self._state[0])
                self.done = status == DONE
                return start
            line = line_at(received, start, stop)
            if line is None:
                return start
            self.failures.setdefault(int(self._state[0]), line[1:].decode(errors="replace"))
            # After a refused ASKING the reply to the command itself is still to come.
            refused_asking = self._asking and self._state[1] == 0
            self._state[:] = (self._state[0], 1) if refused_asking else (self._state[0] + 1, 0)
            start += len(line) + 2

    def _unexpected(self, received: Bytes, start: int, stop: int) -> StoreFailed:
        command = self._commands[self._state[0]]
        got = received[start : min(stop, start + 40)].tobytes()
        return StoreFailed(
            f"a reply is not the {int(command['rows'])} rows of {int(command['width'])} bytes that were asked for, "
            f"it goes on with {got!r}"
        )


class ChangeReplies(Replies):
    """Replies to `block_encode_writes`."""

    def __init__(self, queued: Int64, *, asking: bool = False) -> None:
        """`queued` is int64 `[changes]`: the commands between MULTI and EXEC of each."""
        super().__init__()
        self._queued = queued
        self._asking = asking
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
            self.failures.setdefault(self.completed, line[1:].decode(errors="replace"))
        if self._results:
            self._results -= 1
            if not self._results:
                self._next_change()
            return
        before_exec = 1 + self._asking + int(self._queued[self.completed])
        self._line += 1
        if self._line <= before_exec:
            return
        if line == b"*%d" % self._queued[self.completed]:
            self._results = int(self._queued[self.completed])
            return
        if not line.startswith(b"-"):
            self.failures.setdefault(self.completed, f"EXEC answered {line[:40].decode(errors='replace')}")
        self._next_change()

    def _next_change(self) -> None:
        self.completed += 1
        self._line = 0
        self.done = self.completed == len(self._queued)
