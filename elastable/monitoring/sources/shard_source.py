"""Metrics of a store server, by itself and as the master of its job sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from elastable.embedding_store.shards.server_status import ServerStatus
from elastable.embedding_store.shards.shard import Shard
from elastable.monitoring.metric import Sample, gauge

__all__ = ["METRICS", "servers_source", "shard_source"]

_PUSHED = gauge("elastable_pushed_gradient_bytes", "bytes", "Gradients that a store server keeps for the next version.")
_CLAIMED = gauge("elastable_store_server_claimed", "0 or 1", "Whether a master that is alive has claimed the server.")

_ANSWERS = gauge("elastable_shard_answers", "0 or 1", "Whether a store server of the job answered last.", "shard")
_VERSION = gauge("elastable_shard_version", "version", "Version of a store server of the job.", "shard")
_ROWS = gauge("elastable_shard_rows", "rows", "Rows of a store server of the job.", "shard")
_BYTES = gauge("elastable_shard_memory_bytes", "bytes", "Memory of the rows of a store server of the job.", "shard")
_LAG = gauge("elastable_shard_flush_lag_versions", "versions", "Versions that its tier is behind.", "shard")
_WAITED = gauge("elastable_shard_wait_seconds", "seconds", "How long the job has been waiting for it now.", "shard")

_BY_SHARD = (_ANSWERS, _VERSION, _ROWS, _BYTES, _LAG, _WAITED)
METRICS = (_PUSHED, _CLAIMED, *_BY_SHARD)


def shard_source(shard: Shard) -> Iterator[Sample]:
    """Of one store server."""
    yield _PUSHED(shard.buffered_bytes)
    yield _CLAIMED(bool(shard.ownership.live_owner()))


def servers_source(statuses: Callable[[], Sequence[ServerStatus]]) -> Iterator[Sample]:
    """Of all store servers of a job; a server is named by its address."""
    for server in statuses():
        yield _ANSWERS(not server.failure, server.address)
        yield _WAITED(server.waited_s, server.address)
        if (shard := server.shard) is not None:
            yield _VERSION(shard.version, server.address)
            yield _ROWS(shard.rows, server.address)
            yield _BYTES(shard.bytes, server.address)
            yield _LAG(shard.flush_lag, server.address)
