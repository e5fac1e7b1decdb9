"""All rows of a table that lies on several stores, block by block, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from elastable.embedding_store.composite.partitions.partition import Partition
from elastable.embedding_store.composite.partitions.shard_calls import ShardCalls
from elastable.embedding_store.composite.partitions.shard_reads import ReadsTables
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.rows.row_blocks import chosen_rows
from elastable.embedding_store.support.readers_writer_lock import ReadersWriterLock

__all__ = ["scan_columns", "scan_tokens"]


def scan_tokens(
    table: Partition, stores: Sequence[ReadsTables], calls: ShardCalls, lock: ReadersWriterLock, block_rows: int
) -> Iterator[RowBlock]:
    """One shard after the other."""
    for shard in table.holders:
        blocks = stores[shard].scan(table.spec.name, block_rows)
        while True:
            with lock.reading():
                block = calls.run({shard: partial(next, blocks, None)})[shard]
            if block is None:
                break
            yield replace(block, ids=table.whole_ids(shard, block.ids))


def scan_columns(
    table: Partition, stores: Sequence[ReadsTables], calls: ShardCalls, lock: ReadersWriterLock, block_rows: int
) -> Iterator[RowBlock]:
    """The first shard's blocks, and beside each the same rows of the other shards.

    Shards of one kind hold rows in the same order and are scanned side by
    side. As soon as they differ, the other shards are asked for the first
    one's ids.
    """
    name, (first, *others) = table.spec.name, table.holders
    scans = {shard: stores[shard].scan(name, block_rows) for shard in table.holders}
    alike = True
    while True:
        with lock.reading():
            asked = table.holders if alike else (first,)
            found = calls.run({shard: partial(next, scans[shard], None) for shard in asked})
            leading = found[first]
            if leading is None:
                return
            blocks = [block for shard in others if (block := found.get(shard)) is not None]
            alike = len(blocks) == len(others) and all(np.array_equal(block.ids, leading.ids) for block in blocks)
            if not alike:
                read = calls.run({shard: partial(stores[shard].read_rows, name, leading.ids) for shard in others})
                leading, blocks = _common(leading, [read[shard] for shard in others])
        if len(leading.ids):
            yield table.joined([leading, *blocks])


def _common(leading: RowBlock, others: Sequence[RowBlock]) -> tuple[RowBlock, list[RowBlock]]:
    """The rows that all of them have; some may have been cleared since the first was read."""
    if all(len(block.ids) == len(leading.ids) for block in others):
        return leading, list(others)
    ids: Int64 = leading.ids
    for block in others:
        ids = ids[np.isin(ids, block.ids)]
    return chosen_rows(leading, np.isin(leading.ids, ids)), [
        chosen_rows(block, np.isin(block.ids, ids)) for block in others
    ]
