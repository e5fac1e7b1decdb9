"""A process that writes to Redis and dies, or is stopped, after its n-th write: it sends nothing more."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastable.embedding_store import EmbeddingStore, MemoryStore
from elastable.embedding_store.tiers.redis.connection import Connection
from tests.redis_done import until_done

_WRITES = {b"SET", b"DEL", b"HSET", b"HSETNX", b"HDEL", b"UNLINK", b"EXEC"}


class Died(BaseException):
    """Nobody catches it: the process is gone."""


class Writes:
    """Writes that have been sent; a transaction is one."""

    def __init__(self, most: int | None) -> None:
        self.count = 0  # how many
        self._most = most
        self._streams: dict[Connection, _Commands] = {}

    def allowed(self, connection: Connection, request: memoryview) -> int | None:
        """Bytes up to the end of the last write that may be sent; None: all of it may."""
        commands = self._streams.setdefault(connection, _Commands())
        writes = commands.writes_in(request.tobytes())
        left = None if self._most is None else self._most - self.count
        return writes[left - 1] if left is not None and 0 < left <= len(writes) else None

    def sent(self, connection: Connection, request: bytes) -> bool:
        self.count += len(self._streams[connection].take(request))
        return self._most is not None and self.count >= self._most

    def go_on(self) -> None:
        self._most = None


class _Commands:
    def __init__(self) -> None:
        self._tail = b""
        self._queueing = False

    def writes_in(self, more: bytes) -> list[int]:
        """Places in `more` where a write ends."""
        return self._parse(more)[0]

    def take(self, more: bytes) -> list[int]:
        writes, self._tail, self._queueing = self._parse(more)
        return writes

    def _parse(self, more: bytes) -> tuple[list[int], bytes, bool]:
        text, at, queueing, writes = self._tail + more, 0, self._queueing, list[int]()
        while (found := _command(text, at)) is not None:
            name, at = found
            queueing = name == b"MULTI" or (queueing and name != b"EXEC")
            if name in _WRITES and not queueing:
                writes.append(at - len(self._tail))
        return writes, text[at:], queueing


def _command(text: bytes, at: int) -> tuple[bytes, int] | None:
    """Name of the command at `at` and the place behind it, if it is all there."""
    end = text.find(b"\r\n", at)
    if end < 0:
        return None
    words, behind, name = int(text[at + 1 : end]), end + 2, b""
    for _ in range(words):
        end = text.find(b"\r\n", behind)
        if end < 0:
            return None
        length = int(text[behind + 1 : end])
        if len(text) < end + 4 + length:
            return None
        name = name or text[end + 2 : end + 2 + length].upper()
        behind = end + 4 + length
    return name, behind


def die() -> None:
    raise Died


def abandon(store: EmbeddingStore) -> None:
    """Makes the store write nothing more, also when it is closed: its process is dead."""
    assert isinstance(store, MemoryStore)
    if store._flusher is not None:
        store._flusher.stop()
    store._closed = True


@contextmanager
def dying_after(monkeypatch: pytest.MonkeyPatch, writes: int | None, end: Callable[[], None] = die) -> Iterator[Writes]:
    """Within the block this thread meets its `end` once it has sent so many writes (None: they are counted)."""
    state, send, thread = Writes(writes), Connection.send, threading.get_ident()

    def counted(connection: Connection, pieces: Sequence[memoryview]) -> int:
        if threading.get_ident() != thread:
            return send(connection, pieces)
        request = pieces[0]
        stop = state.allowed(connection, request)
        sent = send(connection, [request if stop is None else request[:stop]])
        if state.sent(connection, request[:sent].tobytes()):
            until_done(connection.socket)
            end()
            state.go_on()  # it was only stopped
        return sent

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "send", counted)
        yield state


@contextmanager
def started(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process of a module below `tests.embedding_store`, which is killed at the end of the block."""
    command = [sys.executable, "-m", f"tests.embedding_store.{module}", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()
