"""Loops over ids for the Redis backend: mixing, grouping by partition, duplicates."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.native.kernel import kernel

__all__ = ["copy_duplicates", "group_by_partition", "grouped_by_partition", "mixed_partitions"]


@kernel
def mix64(value: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit integers."""
    mixed = np.uint64(value)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))  # type: ignore[return-value]  # uint64 inside the kernel


@kernel
def mixed_partitions(ids: Int64, partitions: int) -> Int64:
    """int64 `[n]` ids -> int64 `[n]` partitions; `partitions` is a power of two."""
    result = np.empty(len(ids), np.int64)
    mask = np.uint64(partitions - 1)
    for i in range(len(ids)):
        result[i] = np.int64(mix64(ids[i]) & mask)
    return result


@kernel
def _in_order(ids: Int64, leaders: Int64, partition: Int64, counts: Int64) -> tuple[Int64, Int64]:
    """Ids that lead, and their positions, by partition: a counting sort, so order is kept within each."""
    cursor = np.cumsum(counts) - counts
    grouped = np.empty(counts.sum(), np.int64)
    positions = np.empty(counts.sum(), np.int64)
    for i in range(len(ids)):
        if leaders[i] == i:
            place = cursor[partition[i]]
            cursor[partition[i]] += 1
            grouped[place] = ids[i]
            positions[place] = i
    return grouped, positions


@kernel
def group_by_partition(ids: Int64, partitions: int) -> tuple[Int64, Int64, Int64, Int64]:
    """Unique ids, grouped by partition.

    Args:
        ids: int64 `[n]`, duplicates allowed.
        partitions: A power of two, at most 65536.

    Returns:
        grouped: int64 `[u]`, the unique ids, those of partition 0 first.
        positions: int64 `[u]`, where each of them is first seen in `ids`.
        counts: int64 `[partitions]`, unique ids of each partition.
        leaders: int64 `[n]`, where each id is first seen in `ids`.
    """
    n = len(ids)
    capacity = 16
    while capacity < 2 * n:
        capacity *= 2
    seen = np.full(capacity, -1, np.int64)
    leaders = np.empty(n, np.int64)
    partition = np.empty(n, np.int64)
    counts = np.zeros(partitions, np.int64)
    mask = np.uint64(partitions - 1)
    # The partition takes the low bits of the mix, the place in `seen` higher ones:
    # the two stay independent.
    for i in range(n):
        mixed = mix64(ids[i])
        place = np.int64((mixed >> np.uint64(17)) & np.uint64(capacity - 1))
        while seen[place] >= 0 and ids[seen[place]] != ids[i]:
            place = (place + 1) & (capacity - 1)
        if seen[place] < 0:
            seen[place] = i
            partition[i] = np.int64(mixed & mask)
            counts[partition[i]] += 1
        leaders[i] = seen[place]
    grouped, positions = _in_order(ids, leaders, partition, counts)
    return grouped, positions, counts, leaders


@kernel
def grouped_by_partition(ids: Int64, partitions: int) -> tuple[Int64, Int64, Int64]:
    """Ids, grouped by partition: a counting sort, so order is kept within each.

    Args:
        ids: int64 `[n]`, each once.
        partitions: A power of two, at most 65536.

    Returns:
        grouped: int64 `[n]`, those of partition 0 first.
        positions: int64 `[n]`, where each of them is in `ids`.
        counts: int64 `[partitions]`.
    """
    counts = np.zeros(partitions, np.int64)
    partition = mixed_partitions(ids, partitions)
    for i in range(len(ids)):
        counts[partition[i]] += 1
    cursor = np.cumsum(counts) - counts
    grouped = np.empty(len(ids), np.int64)
    positions = np.empty(len(ids), np.int64)
    for i in range(len(ids)):
        place = cursor[partition[i]]
        cursor[partition[i]] += 1
        grouped[place] = ids[i]
        positions[place] = i
    return grouped, positions, counts


@kernel
def copy_duplicates(rows: Float32, leaders: Int64) -> None:
    """Row i of `rows` (float32 `[n, dim]`) becomes row `leaders[i]`, in place."""
    for i in range(len(leaders)):
        if leaders[i] != i:
            for column in range(rows.shape[1]):
                rows[i, column] = rows[leaders[i], column]
