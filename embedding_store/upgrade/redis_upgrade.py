"""Rewrites a store that an earlier release left in Redis: new keys beside the old ones, which go last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.tiers.redis.connections.reply_shapes import Command
from elastable.embedding_store.tiers.redis.earlier_schema import EarlierRedis, earlier_tables, registry_key
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from elastable.embedding_store.tiers.redis.streams.redis_log import RedisLog
from elastable.embedding_store.upgrade.rewriting import EarlierRows, EarlierTable, described_store, write_store

__all__ = ["current_version", "refuse_earlier_redis", "upgrade_redis"]


def refuse_earlier_redis(place: RedisPlace) -> None:
    """Raises `StoreFailed`, which says what to do, where an earlier release's store is in this place."""
    found = earlier_tables(place.topology, place.url.namespace, place.deadline())
    if found:
        raise StoreFailed(
            f"redis at {place.url} holds {found} tables of an earlier release in namespace {place.url.namespace!r}: "
            "rewrite them once with `elastable store upgrade URL`, or use another ?namespace="
        )


def current_version(place: RedisPlace) -> int | None:
    """The version of an earlier release's store; None: there is none."""
    if not earlier_tables(place.topology, place.url.namespace, place.deadline()):
        return None
    return EarlierRedis(place.topology, place.url.namespace, place.url.deadline).current


def upgrade_redis(place: RedisPlace, version: int | None, wrote: Callable[[str, int], object]) -> bool:
    """Rewrites the store in one place; killed at any moment, it is repeated.

    Rows are written under new keys, then the new state; then the old registry is renamed, which is the moment from
    which on this is a store of this release; then old keys are deleted.

    Args:
        place: Where it is.
        version: To write, the current one or the one before; None: the current one.
        wrote: As of `write_store`.

    Returns:
        Whether there was anything to do.

    Raises:
        StoreFailed: a job is writing to the store, or two stores are in this place.
        StoreBroken: rows are lost, or a commit broke off and cannot be taken back. Nothing was removed.
    """
    namespace, topology = place.url.namespace, place.topology
    there = earlier_tables(topology, namespace, place.deadline())
    done = _done_key(namespace)
    left = int(topology.call([(done, ("HLEN", done))], place.deadline())[0])
    if not there and not left:
        return False
    if (writer := place.other_writer()) is not None:
        raise StoreFailed(f"the store at {place.url} is in use by {writer} (host:process): stop that job first")
    place.take_over()
    if there:
        _write(place, version, wrote)
        registry = registry_key(namespace)
        place.change([], lambda _: [("RENAME", registry, done)], place.deadline())
    _delete(place, EarlierRedis(topology, namespace, place.url.deadline, registry=done))
    return True


def _write(place: RedisPlace, version: int | None, wrote: Callable[[str, int], object]) -> None:
    namespace, topology = place.url.namespace, place.topology
    store = EarlierRedis(topology, namespace, place.url.deadline, version)
    tables = [EarlierTable(table.spec, partial(_rows, store, name)) for name, table in store.tables.items()]
    with RedisTier(place) as tier, RedisLog(place) as log:
        state, wanted = tier.state(), described_store(store.version, store.record(), tables).to_bytes()
        if log.last or state not in (None, wanted):
            raise StoreFailed(
                f"redis at {place.url} holds a store of this release and one of an earlier release in namespace "
                f"{namespace!r}: they cannot be joined. Move one of them to another server, or delete its keys"
            )
        if state is None:
            write_store(tier, store.version, store.record(), tables, wrote)


def _rows(store: EarlierRedis, table: str) -> EarlierRows:
    for ids, rows in store.rows(table):
        yield ids, np.arange(len(ids)), rows


def _delete(place: RedisPlace, store: EarlierRedis) -> None:
    """Deletes the old keys; the renamed registry says which, and goes last."""
    done = _done_key(place.url.namespace)
    for keys in (group for table in store.tables for group in _at_once(store.keys(table))):
        topology = place.writing(place.deadline())
        topology.call([(some[0], ("UNLINK", *some)) for some in keys], place.deadline())
    others: list[Command] = [("UNLINK", *store.other_keys()), ("UNLINK", done)]
    place.change([], lambda _: others, place.deadline())


def _at_once(keys: list[tuple[bytes, ...]], most: int = 256) -> Iterator[list[tuple[bytes, ...]]]:
    for start in range(0, len(keys), most):
        yield keys[start : start + most]


def _done_key(namespace: str) -> bytes:
    """Where the registry of an earlier release is once its tables are rewritten."""
    return f"{{{namespace}}}:upgraded".encode()
