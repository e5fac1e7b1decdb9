"""Connections to servers, kept open between callers; what one left unanswered is ended before the next is used."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Set

import hiredis

from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.tiers.redis.connections.redis_connection import Connection, Deadline
from elastable.embedding_store.tiers.redis.connections.reply_shapes import Command
from elastable.embedding_store.tiers.redis.url import RedisUrl

__all__ = ["Admit", "ConnectionPool", "named_clients"]

Admit = Callable[[Connection, Deadline], None]


class ConnectionPool:
    """Connections to servers, kept open between callers. For many threads at once."""

    def __init__(self, url: RedisUrl, admit: Admit | None = None) -> None:
        """`admit` is called with each new connection and its deadline, and raises where it may not be used."""
        self._url = url
        self._admit = admit
        self._lock = threading.Lock()
        self._idle: dict[Address, list[Connection]] = {}
        self._abandoned: dict[Address, set[str]] = {}
        self._closed = False

    def take(self, address: Address, deadline: Deadline) -> Connection:
        """An idle connection, or a new one. Raises what `Connection` raises."""
        while True:
            with self._lock:
                if self._closed:
                    raise StoreFailed(f"the store at {self._url} is closed")
                idle = self._idle.get(address)
                if not idle:
                    break
                connection = idle.pop()
            if connection.quiet():
                return self._without_abandoned(connection, deadline)
            connection.close()
        connection = Connection(self._url, address, deadline)
        try:
            if self._admit is not None:
                self._admit(connection, deadline)
            return self._without_abandoned(connection, deadline)
        except BaseException:
            connection.close()
            raise

    def give_back(self, connection: Connection) -> None:
        """Keeps a connection on which no reply is outstanding."""
        with self._lock:
            if not self._closed:
                self._idle.setdefault(connection.address, []).append(connection)
                return
        connection.close()

    def abandon(self, connection: Connection) -> None:
        """Closes a connection that broke off; what was sent on it may still wait at the server.

        The server ends it before another connection is given out, so that late requests cannot follow newer ones.
        """
        connection.close()
        if connection.name:
            with self._lock:
                self._abandoned.setdefault(connection.address, set()).add(connection.name)

    def _without_abandoned(self, connection: Connection, deadline: Deadline) -> Connection:
        with self._lock:
            names = self._abandoned.pop(connection.address, set())
        if names:
            try:
                _end(names, connection, deadline)
            except BaseException:
                self.abandon(connection)
                with self._lock:
                    self._abandoned.setdefault(connection.address, set()).update(names)
                raise
        return connection

    def drop_idle(self) -> None:
        """Closes the idle connections: after one broke, the others may be dead too."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def close(self) -> None:
        """Closes what is idle now and what is given back later."""
        with self._lock:
            self._closed = True
        self.drop_idle()


def named_clients(told: bytes) -> Iterator[tuple[str, str]]:
    """(name, number) of each connection that has a name, from what CLIENT LIST tells."""
    for line in told.decode(errors="replace").splitlines():
        words = dict(word.partition("=")[::2] for word in line.split(" "))
        if words.get("name") and "id" in words:
            yield words["name"], words["id"]


def _end(names: Set[str], connection: Connection, deadline: Deadline) -> None:
    """Ends connections of these names at the server, where it allows that; taking over warned where it does not."""
    (told,) = connection.call([("CLIENT", "LIST")], deadline)
    if not isinstance(told, hiredis.ReplyError):
        numbers = [number for name, number in named_clients(told) if name in names]
        kills: list[Command] = [("CLIENT", "KILL", "ID", number) for number in numbers]
        connection.call(kills, deadline)
