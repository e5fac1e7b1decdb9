"""Metrics of a store server: the gradients that it keeps for the next version, and whether a master has claimed it."""

from __future__ import annotations

from collections.abc import Iterator

from elastable.embedding_store.shards.shard import Shard
from elastable.monitoring.metric import Sample, gauge

__all__ = ["METRICS", "shard_source"]

_PUSHED = gauge("elastable_pushed_gradient_bytes", "bytes", "Gradients that a store server keeps for the next version.")
_CLAIMED = gauge("elastable_store_server_claimed", "0 or 1", "Whether a master that is alive has claimed the server.")

METRICS = (_PUSHED, _CLAIMED)


def shard_source(shard: Shard) -> Iterator[Sample]:
    """Of one store server."""
    yield _PUSHED(shard.buffered_bytes)
    yield _CLAIMED(bool(shard.ownership.live_owner()))
