"""The status of a shard as a message."""

from __future__ import annotations

from elastable.embedding_store.shards.server_status import ShardStatus
from elastable.embedding_store.support.printable import printable
from elastable.embedding_store.v1 import store_pb2

__all__ = ["shard_status_from_message", "shard_status_to_message"]


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
    )
