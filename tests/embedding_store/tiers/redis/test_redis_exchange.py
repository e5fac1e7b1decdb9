"""A server is asked for a window's worth at a time, never starved and never flooded."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from elastable.embedding_store.contract.arrays import UInt8
from elastable.embedding_store.tiers.redis.connections.exchange import (
    _WINDOW_BYTES,
    Conversation,
    Replies,
    Requests,
    exchange,
)
from elastable.embedding_store.tiers.redis.connections.redis_connection import _PINGS, ConnectionPool, Deadline
from elastable.embedding_store.tiers.redis.url import RedisUrl

COMMAND = b"c" * 100
REPLY = b"r" * 10
QUIET_S = 0.1


class Counted(Requests):
    """Commands of 100 bytes that are said to move so many."""

    def __init__(self, moved: list[int]) -> None:
        self.moved = np.array(moved, np.int64)
        self.encoded: list[int] = []

    def encode(self, start: int, stop: int) -> UInt8:
        self.encoded += range(start, stop)
        return np.frombuffer(COMMAND * (stop - start), np.uint8)


class Answers(Replies):
    """Answers of 10 bytes."""

    def __init__(self, commands: int) -> None:
        super().__init__()
        self._commands = commands

    def feed(self, received: UInt8, start: int, stop: int) -> int:
        whole = (stop - start) // len(REPLY)
        self.completed += whole
        self.done = self.completed == self._commands
        return start + whole * len(REPLY)


class WaitingServer:
    """Waits for as many commands as it expects, sees that no more come, and answers some.

    Attributes:
        outstanding: Commands that it had not answered, each time.
    """

    def __init__(self, listener: socket.socket, expected: list[int], answers: int) -> None:
        self.outstanding: list[int] = []
        self._listener, self._expected, self._answers = listener, expected, answers

    def serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            for _ in range(_PINGS):
                connection.recv(100)
                connection.sendall(b"+PONG\r\n")
            received = answered = 0
            for expected in self._expected:
                connection.settimeout(60)
                while received < (answered + expected) * len(COMMAND):
                    some = connection.recv(1 << 16)
                    if not some:
                        return
                    received += len(some)
                connection.settimeout(QUIET_S)
                with contextlib.suppress(TimeoutError):
                    received += len(connection.recv(1 << 16))
                self.outstanding.append(received // len(COMMAND) - answered)
                now = min(self.outstanding[-1], self._answers)
                connection.sendall(REPLY * now)
                answered += now


@contextlib.contextmanager
def waiting_server(expected: list[int], answers: int) -> Iterator[RedisUrl]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = WaitingServer(listener, expected, answers)
        thread = threading.Thread(target=server.serve)
        thread.start()
        yield RedisUrl.parse(f"redis://127.0.0.1:{listener.getsockname()[1]}")
        thread.join(60)
        assert not thread.is_alive()
    assert server.outstanding == expected


def talk(url: RedisUrl, moved: list[int], round_trip_s: float = 0.0) -> None:
    requests, replies, deadline = Counted(moved), Answers(len(moved)), Deadline(60)
    pool = ConnectionPool(url)
    connection = pool.take(url.seeds[0], deadline)
    connection.round_trip_s = round_trip_s
    pool.give_back(connection)
    try:
        exchange(pool, [Conversation(url.seeds[0], requests, replies)], deadline)
    finally:
        pool.close()
    assert requests.encoded == list(range(len(moved)))


def test_no_more_than_a_window_is_outstanding() -> None:
    with waiting_server([8, 8, 4], answers=100) as url:
        talk(url, [_WINDOW_BYTES // 8] * 20)


def test_new_commands_wait_until_half_the_window_is_free() -> None:
    with waiting_server([8, 5, 8, 5, 8, 5, 2], answers=3) as url:
        talk(url, [_WINDOW_BYTES // 8] * 20)


@pytest.mark.parametrize("moved", [2 * _WINDOW_BYTES, 40 * _WINDOW_BYTES])
def test_of_commands_larger_than_the_window_there_are_two_outstanding(moved: int) -> None:
    with waiting_server([2, 2, 2, 1], answers=1) as url:
        talk(url, [moved] * 4)


def test_a_longer_way_has_a_wider_window() -> None:
    with waiting_server([20], answers=100) as url:
        talk(url, [_WINDOW_BYTES // 8] * 20, round_trip_s=0.1)
