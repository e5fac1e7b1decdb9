"""Rows taken away from Redis: which commands it needs, and what their replies say. Pure planning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from embedding_store.redis.catalog import TableKeys
from embedding_store.redis.kernels import group_by_partition
from embedding_store.redis.schema import slots_key, weights_key
from embedding_store.store import Int64

__all__ = ["deletions", "rows_deleted"]

_WORDS_A_CALL = 4  # MULTI, HDEL of weights, HDEL of slots, EXEC

KeyedWords = tuple[bytes, tuple[Any, ...]]
"""A key, and a command that goes where the key lies."""


def deletions(namespace: str, table: TableKeys, ids: Int64) -> list[KeyedWords]:
    """One transaction for each partition that has some of the ids: its rows and their slots go together.

    Args:
        namespace: Of the store.
        table: The table.
        ids: int64 `[n]`, duplicates allowed.
    """
    grouped, _, counts, _ = group_by_partition(ids, table.partitions)
    fields = np.ascontiguousarray(grouped.astype("<i8")).tobytes()
    commands: list[KeyedWords] = []
    start = 0
    for partition in np.flatnonzero(counts).tolist():
        stop = start + int(counts[partition])
        names = [fields[8 * at : 8 * at + 8] for at in range(start, stop)]
        weights = weights_key(namespace, table.spec.name, partition)
        slots = slots_key(namespace, table.spec.name, partition)
        words = ("MULTI",), ("HDEL", weights, *names), ("HDEL", slots, *names), ("EXEC",)
        commands += [(weights, each) for each in words]
        start = stop
    return commands


def rows_deleted(replies: Sequence[Any]) -> int:
    """How many rows there were, from the replies to `deletions`."""
    return sum(int(executed[0]) for executed in replies[_WORDS_A_CALL - 1 :: _WORDS_A_CALL])
