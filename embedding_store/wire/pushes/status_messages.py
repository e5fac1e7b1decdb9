"""The status of a shard as a message."""

from __future__ import annotations

import math
from collections.abc import Iterable

from elastable.embedding_store.measures.values import BOUNDS_S, Histogram
from elastable.embedding_store.shards.shard_store import ShardStatus
from elastable.embedding_store.support.printable import printable
from elastable.embedding_store.v1 import store_pb2

__all__ = ["shard_status_from_message", "shard_status_to_message"]

_PHASES = ("prepare", "apply", "append")


def shard_status_to_message(status: ShardStatus) -> store_pb2.ShardStatus:
    """What a server says of its shard."""
    return store_pb2.ShardStatus(
        version=status.version,
        rows=status.rows,
        bytes=status.bytes,
        wanted_rows=status.wanted_rows,
        read_rows=status.read_rows,
        flush_lag=status.flush_lag,
        log_bytes=status.log_bytes,
        pushed_bytes=status.pushed_bytes,
        failure=status.failure,
        store=status.store,
        commits=[
            store_pb2.CommitPhase(phase=phase, counts=took.counts, seconds=took.seconds)
            for phase, took in status.commits.items()
        ],
    )


def shard_status_from_message(message: store_pb2.ShardStatus) -> ShardStatus:
    """What a server says of its shard; its text is fit for a terminal, and no number is below 0."""
    return ShardStatus(
        max(0, message.version),
        max(0, message.rows),
        max(0, message.bytes),
        max(0, message.wanted_rows),
        max(0, message.read_rows),
        max(0, message.flush_lag),
        max(0, message.log_bytes),
        max(0, message.pushed_bytes),
        printable(message.failure, 1024),
        printable(message.store, 1024, lines=False),
        _commits(message.commits),
    )


def _commits(phases: Iterable[store_pb2.CommitPhase]) -> dict[str, Histogram]:
    """Phases that there are, with as many buckets as there are here; others are left out."""
    found = {}
    for each in phases:
        known = each.phase in _PHASES and len(each.counts) == len(BOUNDS_S) + 1
        if known and min(each.counts) >= 0 and math.isfinite(each.seconds) and each.seconds >= 0:
            found[each.phase] = Histogram(tuple(each.counts), each.seconds)
    return found
