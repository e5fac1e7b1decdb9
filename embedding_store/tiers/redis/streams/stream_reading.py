"""Reads the log of a store in Redis, some stream entries at a time."""

from __future__ import annotations

from collections.abc import Iterator

from elastable.embedding_store.errors import StoreBroken
from elastable.embedding_store.tiers.redis.connections.redis_connection import Deadline
from elastable.embedding_store.tiers.redis.connections.reply_shapes import Command, Reply
from elastable.embedding_store.tiers.redis.connections.topology import Topology
from elastable.embedding_store.tiers.redis.schema import log_key
from elastable.embedding_store.tiers.redis.streams.stream_records import StreamPart, part_of

__all__ = ["LAST_PART", "last_part", "oldest_part", "stream_entries"]

#: The greatest number that a part can have.
LAST_PART = (1 << 64) - 1
_AT_ONCE = 16  # of half a MiB each they are 8 MiB


def stream_entries(topology: Topology, begin: bytes, end: bytes) -> Iterator[Reply]:
    """The stream entries from one id to another, as hiredis gives them; each round trip has a deadline of its own.

    Raises:
        StoreBroken: the answer is no list of stream entries.
        StoreFailed, Unavailable, DeadlineExceeded: as `Topology.call`.
    """
    key = log_key(topology.url.namespace)
    while True:
        words = ("XRANGE", key, begin, end, "COUNT", _AT_ONCE)
        (found,) = topology.call([(key, words)], Deadline(topology.url.deadline))
        for entry in found:
            if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], bytes)):
                raise StoreBroken(f"redis at {topology.url} answered XRANGE with {repr(entry)[:80]}")
        yield from found
        if len(found) < _AT_ONCE:
            return
        begin = b"(%b" % found[-1][0]


def oldest_part(topology: Topology, name: str, deadline: Deadline) -> StreamPart | None:
    """The first part of the log; None: it is empty. Raises what `stream_entries` and `part_of` raise."""
    key = log_key(topology.url.namespace)
    return _one(topology, name, key, ("XRANGE", key, "-", "+", "COUNT", 1), deadline)


def last_part(topology: Topology, name: str, sequence: int, deadline: Deadline) -> StreamPart | None:
    """The last part of an entry; None: it is not there. Raises as `oldest_part`."""
    key = log_key(topology.url.namespace)
    words = ("XREVRANGE", key, b"%d-%d" % (sequence, LAST_PART), b"%d-0" % sequence, "COUNT", 1)
    return _one(topology, name, key, words, deadline)


def _one(topology: Topology, name: str, key: bytes, words: Command, deadline: Deadline) -> StreamPart | None:
    (found,) = topology.call([(key, words)], deadline)
    return part_of(found[0], name) if found else None
