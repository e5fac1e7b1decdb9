"""Bulk requests and replies on several connections at once, by one thread."""

import select
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.tiers.redis.connections.redis_connection import Connection, ConnectionPool, Deadline

_WINDOW_BYTES = 1 << 19  # measured: 128 KiB starve a server, more than 1 MiB cools its cache
_MOST_BYTES = 1 << 23
_BYTES_PER_S = 2e9  # what a window lets through over a longer way


class Requests(ABC):
    """Requests to one server, encoded as they are needed.

    Attributes:
        moved: int64 `[commands]`: about how many bytes each command moves, in its request and its reply.
    """

    moved: Int64

    def admit(self, connection: Connection, deadline: Deadline) -> bool:
        """Looks at the connection that was chosen, before anything is sent; False: say nothing to this server."""
        return True

    @abstractmethod
    def encode(self, start: int, stop: int) -> UInt8:
        """The commands `start..stop`, one after another; called once for each, in order."""


class Replies(ABC):
    """Replies that are still to come on one connection.

    Attributes:
        failures: Command -> the error line that the server answered, without its `-`.
        completed: Commands that have been answered, whole.
        done: All replies have come.
    """

    def __init__(self) -> None:
        self.failures: dict[int, str] = {}
        self.completed = 0
        self.done = False

    @abstractmethod
    def feed(self, received: UInt8, start: int, stop: int) -> int:
        """Decodes what it can of `received[start:stop]`; returns the place of the first byte left.

        Raises:
            StoreFailed: the bytes are no reply to what was asked.
        """


@dataclass(frozen=True, slots=True)
class Conversation:
    """What to say to one server, and what to make of its answer.

    Attributes:
        address: The server.
        requests: What to ask.
        replies: Takes the bytes that come back.
    """

    address: Address
    requests: Requests
    replies: Replies


def exchange(pool: ConnectionPool, conversations: Sequence[Conversation], deadline: Deadline) -> None:
    """Holds all conversations to their end.

    A server is asked for a little more while it answers what it was asked before, and never for everything at once: it
    writes the replies to a command into memory as fast as it executes it, however slowly they are sent, and megabytes
    of them wash the table out of its processor's cache. With a window on what is outstanding a lookup costs the server
    half the time. One thread suffices: it moves bytes faster than a server makes them.

    Raises:
        Unavailable, DeadlineExceeded: naming address and deadline.
        StoreFailed: a server sent what is no reply.
    """
    streams: dict[int, _Stream] = {}
    poller = select.poll()
    try:
        for conversation in conversations:
            connection = pool.take(conversation.address, deadline)
            stream = streams[connection.socket.fileno()] = _Stream(connection, conversation)
            if conversation.requests.admit(connection, deadline):
                stream.send()
            else:
                pool.give_back(streams.pop(connection.socket.fileno()).connection)
        for handle, stream in streams.items():
            poller.register(handle, stream.interest())
        while streams:
            slowest = next(iter(streams.values())).connection.address
            ready = poller.poll(1000 * deadline.left(slowest))
            if not ready:
                raise deadline.exceeded(slowest)
            for handle, events in ready:
                stream = streams[handle]
                before = stream.interest()
                stream.move(events)
                if stream.finished():
                    poller.unregister(handle)
                    pool.give_back(streams.pop(handle).connection)
                elif stream.interest() != before:
                    poller.modify(handle, stream.interest())
    finally:
        # Whatever is left here broke off in the middle: replies may still be on their way.
        for stream in streams.values():
            pool.abandon(stream.connection)


class _Stream:
    """One conversation on its connection."""

    def __init__(self, connection: Connection, conversation: Conversation) -> None:
        self.connection = connection
        self._requests, self._replies = conversation.requests, conversation.replies
        self._window = min(max(_WINDOW_BYTES, int(connection.round_trip_s * _BYTES_PER_S)), _MOST_BYTES)
        self._ends = [0, *np.cumsum(conversation.requests.moved).tolist()]  # of each command, in bytes moved
        self._made = 0  # commands encoded
        self._unsent = memoryview(b"")
        self._start = self._stop = 0  # undecoded bytes of the inbox

    def interest(self) -> int:
        return select.POLLIN | select.POLLOUT if self._unsent else select.POLLIN

    def finished(self) -> bool:
        return self._replies.done and self._made + 1 == len(self._ends) and not self._unsent

    def move(self, events: int) -> None:
        """Does what the socket is ready for."""
        if events & select.POLLOUT:
            self.send()
        if events & ~select.POLLOUT:
            self._receive()

    def send(self) -> None:
        """Sends what the window and the socket have room for."""
        while True:
            if self._unsent:
                self._unsent = self._unsent[self.connection.send(self._unsent) :]
                if self._unsent:
                    return
            stop = self._room_up_to()
            if stop == self._made:
                return
            self._unsent = self._requests.encode(self._made, stop).data
            self._made = stop

    def _room_up_to(self) -> int:
        """The command before which the window ends; no new ones before half of it is free."""
        done = self._replies.completed
        if self._ends[self._made] - self._ends[done] > self._window // 2 and self._made - done > 1:
            return self._made
        stop = bisect_right(self._ends, self._ends[done] + self._window) - 1
        return min(max(stop, self._made + 1), len(self._ends) - 1)

    def _receive(self) -> None:
        """Receives what has come, decodes what is whole, and asks for more."""
        connection, replies = self.connection, self._replies
        while received := connection.receive(self._stop):
            self._stop += received
            self._start = replies.feed(connection.inbox, self._start, self._stop)
            if replies.done and self._start < self._stop:
                raise StoreFailed(f"redis at {connection.address} sent more than it was asked for")
            self._make_room()
            self.send()
            if not connection.holds_decrypted():
                return

    def _make_room(self) -> None:
        """Moves the undecoded rest to the front; doubles an inbox that one row fills."""
        inbox, rest = self.connection.inbox, self._stop - self._start
        if self._start:
            inbox[:rest] = inbox[self._start : self._stop].copy()
        elif rest == len(inbox):
            self.connection.inbox = np.empty(2 * len(inbox), np.uint8)
            self.connection.inbox[:rest] = inbox
        self._start, self._stop = 0, rest
