"""A long request to one server, sent piece by piece as it is made, without a copy of its pieces."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Sequence

import hiredis

from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.log.contract import Buffer
from elastable.embedding_store.tiers.redis.connections.redis_connection import Connection, Deadline

__all__ = ["converse"]

_MOST_PIECES = 512  # the system takes 1,024 buffers at a time
_MOST_REPLY_BYTES = 1 << 20


def converse(
    connection: Connection, requests: Iterator[Sequence[Buffer]], wanted: int, deadline: Deadline
) -> list[object]:
    """Sends all requests and receives so many replies; errors of the server stand among them.

    Args:
        connection: On which no reply is outstanding.
        requests: Bytes to send, made while those before them are on their way.
        wanted: Commands among them, each of which has a short reply.
        deadline: Of everything together.

    Raises:
        Unavailable, DeadlineExceeded: naming address and deadline.
        StoreFailed: what answers speaks no Redis.
    """
    reader = hiredis.Reader(notEnoughData=Connection)
    replies: list[object] = []
    unsent: list[memoryview] = []
    received = 0
    while len(replies) < wanted:
        if not unsent:
            unsent = [memoryview(piece).cast("B") for piece in next(requests, ()) if len(piece)]
        if unsent and (sent := _send(connection, unsent)):
            unsent = _without(unsent, sent)
            continue
        got = connection.receive(0)
        if not got:
            connection.wait(bool(unsent), deadline)
            continue
        received += got
        reader.feed(connection.inbox[:got].tobytes())
        try:
            while (reply := reader.gets()) is not Connection:
                replies.append(reply)
        except hiredis.ProtocolError as error:
            raise StoreFailed(f"what listens at {connection.address} speaks no Redis: {error}") from error
        if received > _MOST_REPLY_BYTES or len(replies) > wanted:
            raise StoreFailed(f"redis at {connection.address} sent more than it was asked for")
    return replies


def _send(connection: Connection, pieces: list[memoryview]) -> int:
    """Bytes of the pieces, one after the other, that went out at once; 0 if none can go now."""
    if isinstance(connection.socket, ssl.SSLSocket):  # which has no sendmsg
        return connection.send(pieces[0])
    try:
        return connection.socket.sendmsg(pieces[:_MOST_PIECES])
    except BlockingIOError:
        return 0
    except OSError as error:
        raise connection.lost(error) from error


def _without(pieces: list[memoryview], sent: int) -> list[memoryview]:
    """The pieces after the first bytes; empty ones are left out."""
    for number, piece in enumerate(pieces):
        if sent < len(piece):
            return [piece[sent:], *pieces[number + 1 :]]
        sent -= len(piece)
    return []
