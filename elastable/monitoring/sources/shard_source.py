"""Metrics of a store server, by itself and as the master of its job sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from elastable.embedding_store.composite import CompositeSource, ShardedStore
from elastable.embedding_store.shards import ServerStatus, Shard, ShardStatus
from elastable.monitoring.metric import Sample, counter, gauge, histogram

__all__ = ["METRICS", "servers_source", "shard_lookups_source", "shard_source"]

_PUSHED = gauge(
    "elastable_pushed_gradient_bytes",
    "bytes",
    "Gradients that a store server keeps for the next version, and its slice of dense variables.",
)
_CLAIMED = gauge("elastable_store_server_claimed", "0 or 1", "Whether a master that is alive has claimed the server.")

_ANSWERS = gauge("elastable_shard_answers", "0 or 1", "Whether a store server of the job answered last.", "shard")
_VERSION = gauge("elastable_shard_version", "version", "Version of a store server of the job.", "shard")
_ROWS = gauge("elastable_shard_rows", "rows", "Rows of a store server of the job.", "shard")
_BYTES = gauge("elastable_shard_memory_bytes", "bytes", "Memory of the rows of a store server of the job.", "shard")
_LAG = gauge("elastable_shard_flush_lag_versions", "versions", "Versions that its tier is behind.", "shard")
_WAITED = gauge("elastable_shard_wait_seconds", "seconds", "How long the job has been waiting for it now.", "shard")

_WANTED = counter("elastable_shard_tier_wanted_rows_total", "rows", "Rows asked of it, if it has a tier.", "shard")
_READ = counter("elastable_shard_tier_read_rows_total", "rows", "Rows that it had to read from its tier.", "shard")
_LOG = gauge("elastable_shard_log_bytes", "bytes", "Bytes of its log that its tier does not make superfluous.", "shard")
_COMMIT = histogram(
    "elastable_shard_commit_phase_seconds", "seconds", "Its commits: prepare, apply, append.", "shard", "phase"
)
_LOOKUPS = counter(
    "elastable_shard_lookups_total", "lookups", "Lookups of this process at a store server.", "table", "shard"
)
_LOOKED_UP = counter("elastable_shard_lookup_rows_total", "rows", "Rows that these asked for.", "table", "shard")

_BY_SHARD = (_ANSWERS, _VERSION, _ROWS, _BYTES, _LAG, _WAITED, _WANTED, _READ, _LOG, _COMMIT, _LOOKUPS, _LOOKED_UP)
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
            yield from _of(shard, server.address)


def shard_lookups_source(source: object, servers: object) -> Iterator[Sample]:
    """Of the lookups of this process, where `source` splits them over the servers of the store `servers`."""
    if not isinstance(source, CompositeSource) or not isinstance(servers, ShardedStore):
        return
    addresses = servers.addresses()
    for (table, number), total in source.lookups.lookups.totals().items():
        yield _LOOKUPS(total, table, addresses[int(number)])
    for (table, number), total in source.lookups.rows.totals().items():
        yield _LOOKED_UP(total, table, addresses[int(number)])


def _of(shard: ShardStatus, address: str) -> Iterator[Sample]:
    yield _VERSION(shard.version, address)
    yield _ROWS(shard.rows, address)
    yield _BYTES(shard.bytes, address)
    yield _LAG(shard.flush_lag, address)
    yield _WANTED(shard.wanted_rows, address)
    yield _READ(shard.read_rows, address)
    yield _LOG(shard.log_bytes, address)
    for phase, took in shard.commits.items():
        yield _COMMIT(took, address, phase)
