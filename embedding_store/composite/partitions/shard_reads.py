"""What shards hold of a table, read from each of them and put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from elastable.embedding_store.composite.partitions.partition import Partition
from elastable.embedding_store.composite.partitions.shard_calls import ShardCalls
from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.rows.checks import require_ids
from elastable.embedding_store.rows.row_blocks import chosen_rows, joined_rows

__all__ = ["ReadsTables", "count_rows", "of_rows", "read_rows", "read_sightings"]


class ReadsTables(Protocol):
    """What is read of a shard, or of a version that is pinned there."""

    def row_count(self, table: str) -> int:
        """As in `EmbeddingStore.row_count`."""
        ...

    def scan(self, table: str, block_rows: int = ...) -> Iterator[RowBlock]:
        """As in `EmbeddingStore.scan`."""
        ...

    def read_rows(self, table: str, ids: Int64) -> RowBlock:
        """As in `EmbeddingStore.read_rows`."""
        ...

    def sightings(self, table: str) -> UInt8 | None:
        """As in `EmbeddingStore.sightings`."""
        ...


def of_rows(table: Partition, counts: Mapping[int, int]) -> int:
    """How many rows the shards' counts make: with the encoding partition every shard counts the same ones."""
    return sum(counts.values()) if table.by_token else next(iter(counts.values()))


def count_rows(table: Partition, shards: Sequence[ReadsTables], calls: ShardCalls) -> int:
    """As `EmbeddingStore.row_count`."""
    counts = {number: partial(shards[number].row_count, table.spec.name) for number in table.holders}
    return of_rows(table, calls.run(counts))


def read_rows(table: Partition, shards: Sequence[ReadsTables], calls: ShardCalls, ids: Int64) -> RowBlock:
    """As `EmbeddingStore.read_rows`."""
    parts = table.parts(require_ids(table.spec, ids))
    read = calls.run({part.shard: partial(shards[part.shard].read_rows, table.spec.name, part.ids) for part in parts})
    blocks = [read[part.shard] for part in parts]
    if not table.by_token:
        return table.joined(blocks)
    named = [
        replace(block, ids=table.whole_ids(part.shard, block.ids)) for part, block in zip(parts, blocks, strict=True)
    ]
    return _in_order_of(ids, joined_rows(table.spec, named))


def read_sightings(table: Partition, shards: Sequence[ReadsTables], calls: ShardCalls) -> UInt8 | None:
    """As `EmbeddingStore.sightings`: the greatest counters of all shards, which is enough for each of them."""
    told = calls.run({number: partial(shards[number].sightings, table.spec.name) for number in table.holders})
    sketches = [counters for counters in told.values() if counters is not None]
    joined: UInt8 | None = np.maximum.reduce(sketches) if sketches else None
    return joined


def _in_order_of(ids: Int64, block: RowBlock) -> RowBlock:
    """The block's rows in the order in which `ids` names them."""
    order = np.argsort(ids, kind="stable")
    places = order[np.searchsorted(ids, block.ids, sorter=order)]
    return chosen_rows(block, np.argsort(places, kind="stable"))
