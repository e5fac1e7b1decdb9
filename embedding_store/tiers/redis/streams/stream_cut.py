"""Takes the newest entries of the log of a store in Redis back, so that their numbers can be used again."""

from __future__ import annotations

from elastable.embedding_store.tiers.redis.connections.redis_connection import Deadline
from elastable.embedding_store.tiers.redis.connections.reply_shapes import Command
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from elastable.embedding_store.tiers.redis.schema import log_key
from elastable.embedding_store.tiers.redis.streams.stream_ends import StreamEnd
from elastable.embedding_store.tiers.redis.streams.stream_reading import LAST_PART, stream_entries

__all__ = ["cut_stream"]

_GREATEST_ID = b"%d-%d" % (LAST_PART, LAST_PART)
_AT_ONCE = 1_000  # stream ids in one XDEL


def cut_stream(place: RedisPlace, end: StreamEnd, deadline: Deadline) -> None:
    """Makes `end` the newest entry, in one transaction. To repeat it does no harm.

    Raises:
        TakenOver: another process owns the store.
        StoreFailed, Unavailable, DeadlineExceeded: it may have been done where the connection broke.
    """
    key = log_key(place.url.namespace)
    ids = [entry[0] for entry in stream_entries(place.topology, b"%d-0" % (end.last + 1), b"+")]
    chunks = [ids[at : at + _AT_ONCE] for at in range(0, len(ids), _AT_ONCE)]
    # Redis lets a stream's last id not go below its greatest deleted one: that has to be lowered first.
    lowered: list[Command] = [("XSETID", key, _GREATEST_ID, "MAXDELETEDID", end.id), ("XSETID", key, end.id)]
    commands: list[Command] = [*(("XDEL", key, *chunk) for chunk in chunks), *lowered] if end.last else [("DEL", key)]
    place.change([], lambda _: commands, deadline)
