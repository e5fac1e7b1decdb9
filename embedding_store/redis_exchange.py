"""Bulk requests and replies on several connections at once, by one thread.

Everything that can be sent is sent while replies are decoded, so a server never
waits for the client between commands, and several servers work at the same
time. One thread suffices: it moves bytes faster than a server makes them.
"""

from __future__ import annotations

import select
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from embedding_store.errors import StoreFailed
from embedding_store.redis_connection import Connection, ConnectionPool, Deadline
from embedding_store.resp_codec import Bytes
from embedding_store.resp_replies import Replies
from embedding_store.rpc_address import Address

__all__ = ["Conversation", "exchange"]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What to say to one server, and what to make of its answer.

    Attributes:
        address: The server.
        requests: Encoded requests in pieces, made as they are needed.
        replies: Takes the bytes that come back.
    """

    address: Address
    requests: Iterator[Bytes]
    replies: Replies


def exchange(pool: ConnectionPool, conversations: Sequence[Conversation], deadline: Deadline) -> None:
    """Holds all conversations to their end.

    Raises:
        Unavailable, DeadlineExceeded: naming address and deadline.
        StoreFailed: a server sent what is no reply.
    """
    streams: dict[int, _Stream] = {}
    poller = select.poll()
    try:
        for conversation in conversations:
            stream = _Stream(pool.take(conversation.address, deadline), conversation)
            streams[stream.connection.socket.fileno()] = stream
            stream.send()
        for handle, stream in streams.items():
            poller.register(handle, stream.interest())
        while streams:
            slowest = next(iter(streams.values())).connection.address
            ready = poller.poll(1000 * deadline.left(slowest))
            if not ready:
                raise deadline.exceeded(slowest)
            for handle, events in ready:
                stream = streams[handle]
                if events & select.POLLOUT:
                    stream.send()
                if events & ~select.POLLOUT:
                    stream.receive()
                if stream.finished():
                    poller.unregister(handle)
                    pool.give_back(streams.pop(handle).connection)
                else:
                    poller.modify(handle, stream.interest())
    finally:
        # Whatever is left here broke off in the middle: replies may still be on their way.
        for stream in streams.values():
            stream.connection.close()


class _Stream:
    """One conversation on its connection."""

    def __init__(self, connection: Connection, conversation: Conversation) -> None:
        self.connection = connection
        self._conversation = conversation
        self._unsent = memoryview(b"")
        self._all_made = False
        self._start = self._stop = 0  # undecoded bytes of the inbox

    def interest(self) -> int:
        return select.POLLIN | (0 if self._all_made and not self._unsent else select.POLLOUT)

    def finished(self) -> bool:
        return self._all_made and not self._unsent and self._conversation.replies.done

    def send(self) -> None:
        """Sends until the socket is full or a piece is out: replies must get their turn."""
        if not self._unsent and not self._all_made:
            piece = next(self._conversation.requests, None)
            self._all_made = piece is None
            self._unsent = memoryview(b"") if piece is None else piece.data
        if self._unsent:
            self._unsent = self._unsent[self.connection.send(self._unsent) :]

    def receive(self) -> None:
        """Receives what has come and decodes what is whole."""
        connection, replies = self.connection, self._conversation.replies
        while received := connection.receive(self._stop):
            self._stop += received
            self._start = replies.feed(connection.inbox, self._start, self._stop)
            if replies.done and self._start < self._stop:
                raise StoreFailed(f"redis at {connection.address} sent more than it was asked for")
            self._make_room()
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
