"""Rows taken away from Redis: which commands it needs, and what their replies say. Pure planning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.tiers.redis.catalog import Catalog, TableKeys
from elastable.embedding_store.tiers.redis.redis_kernels import group_by_partition
from elastable.embedding_store.tiers.redis.transactions import Transaction

__all__ = ["deletions", "removal", "rows_deleted"]


def deletions(catalog: Catalog, table: TableKeys, ids: Int64) -> list[Transaction]:
    """One transaction for each partition that has some of the ids: its rows and their slots go together.

    Args:
        catalog: All tables.
        table: The table.
        ids: int64 `[n]`, duplicates allowed.
    """
    grouped, _, counts, _ = group_by_partition(ids, table.partitions)
    fields = np.ascontiguousarray(grouped.astype("<i8")).tobytes()
    commands: list[Transaction] = []
    start = 0
    for partition in np.flatnonzero(counts).tolist():
        stop = start + int(counts[partition])
        names = [fields[8 * at : 8 * at + 8] for at in range(start, stop)]
        weights, slots, _ = catalog.names[table.first + partition]
        commands.append((weights, [("HDEL", weights, *names), ("HDEL", slots, *names)]))
        start = stop
    return commands


def rows_deleted(executed: Sequence[Sequence[int]]) -> int:
    """How many rows there were, from what EXEC answered to `deletions`."""
    return sum(int(counts[0]) for counts in executed)


def removal(key: bytes, ids: Int64, fields: Sequence[bytes] = ()) -> bytes:
    """An HDEL, encoded.

    Args:
        key: Of the hash.
        ids: int64 `[n]`: fields of 8 bytes.
        fields: Further ones.
    """
    words = np.empty((len(ids), 14), np.uint8)
    words[:, :4] = np.frombuffer(b"$8\r\n", np.uint8)
    words[:, 4:12] = np.ascontiguousarray(ids, "<i8").view(np.uint8).reshape(-1, 8)
    words[:, 12:] = np.frombuffer(b"\r\n", np.uint8)
    head = b"*%d\r\n$4\r\nHDEL\r\n$%d\r\n%s\r\n" % (2 + len(ids) + len(fields), len(key), key)
    return head + words.tobytes() + b"".join(b"$%d\r\n%s\r\n" % (len(field), field) for field in fields)
