"""All keys of one store in Redis, found by their names: also those that its registry of tables has lost."""

from __future__ import annotations

from collections.abc import Iterator

import hiredis

from elastable.embedding_store.errors import StoreBroken
from elastable.embedding_store.tiers.redis.connections.reply_errors import reply_error
from elastable.embedding_store.tiers.redis.connections.reply_shapes import Command
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from elastable.embedding_store.tiers.redis.schema import (
    STAMP,
    all_rows_pattern,
    log_key,
    tier_state_key,
    tier_tables_key,
)

__all__ = ["delete_namespace", "require_registry"]

_SCANNED = 1000  # keys that a server looks at for one reply
_NEVER_WRITTEN = bytes(8)


def require_registry(place: RedisPlace) -> None:
    """Raises `StoreBroken` where there are records of tables, and neither registry nor state know of any table.

    A Cluster loses no more than that with one of its nodes, and looks like an empty store then.
    """
    if _has_registry(place):
        return
    for keys in _partitions(place):
        asked: list[tuple[bytes, Command]] = []
        for key in keys:
            asked += [(key, ("HLEN", key)), (key, ("HGET", key, STAMP))]
        replies = place.topology.call(asked, place.deadline())
        for key, length, stamp in zip(keys, replies[::2], replies[1::2], strict=True):
            # A table that another process is making has its partitions first; nothing was written to them.
            if (length > 1 or stamp != _NEVER_WRITTEN) and not _has_registry(place):
                raise StoreBroken(
                    f"redis at {place.url} holds records (key {key.decode(errors='replace')}) of a store whose "
                    f"registry of tables it has lost (namespace {place.url.namespace!r}). Go back to a checkpoint"
                )


def delete_namespace(place: RedisPlace) -> None:
    """Takes the store over, and deletes its rows, whatever they are, its tables and its log.

    Raises:
        TakenOver: another process has taken over meanwhile.
        StoreFailed, Unavailable, DeadlineExceeded: some are deleted. Those that are left are refused as before, since
            the registry of tables goes last.
    """
    place.take_over()
    for keys in _partitions(place):
        deadline = place.deadline()
        place.writing(deadline).call([(key, ("UNLINK", key)) for key in keys], deadline)
    namespace = place.url.namespace
    gone: Command = ("DEL", tier_tables_key(namespace), tier_state_key(namespace), log_key(namespace))
    place.change([], lambda _: [gone], place.deadline())


def _has_registry(place: RedisPlace) -> bool:
    keys = tier_tables_key(place.url.namespace), tier_state_key(place.url.namespace)
    return any(place.topology.call([(key, ("EXISTS", key)) for key in keys], place.deadline()))


def _partitions(place: RedisPlace) -> Iterator[list[bytes]]:
    """Keys of the records of partitions, some at a time; maybe one of them twice."""
    topology, pattern = place.topology, all_rows_pattern(place.url.namespace)
    for node in topology.nodes():
        cursor = b"0"
        while True:
            words: Command = ("SCAN", cursor, "MATCH", pattern, "COUNT", _SCANNED)
            (reply,) = topology.call_at(node, [words], place.deadline())
            if isinstance(reply, hiredis.ReplyError):
                raise reply_error(f"redis at {node} does not list its keys", str(reply), place.url)
            cursor, keys = reply
            if keys:
                yield keys
            if cursor == b"0":
                break
