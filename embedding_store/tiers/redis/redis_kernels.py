"""Loops over ids for the Redis backend: mixing, and grouping by partition."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.native.kernel import kernel

__all__ = ["grouped_by_partition", "mixed_partitions"]


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
