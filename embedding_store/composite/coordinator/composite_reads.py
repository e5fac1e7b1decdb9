"""Reads of whole tables from several stores, or from one version of each: counts, rows with their slots, scans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from elastable.embedding_store.composite.coordinator.composite_source import CompositeSource
from elastable.embedding_store.composite.splits.partition import Partition
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import RowBlock, TableState, TableStatistics
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.rows.checks import require_block_rows, require_ids
from elastable.embedding_store.rows.row_blocks import chosen_rows, joined_rows

__all__ = ["CompositeReads", "total_rows", "total_statistics"]

Readable = TypeVar("Readable", bound=Snapshot)


class CompositeReads(CompositeSource[Readable], Snapshot):
    """One version of several stores, pinned or current."""

    def row_count(self, table: str) -> int:
        with self._lock.reading():  # else some stores might count rows of a commit that others have yet to make
            found = self._partition(table)
            return total_rows(found, self._each(lambda store: store.row_count(table), found.holders))

    def read_rows(self, table: str, ids: Int64) -> RowBlock:
        with self._lock.reading():
            found = self._partition(table)
            parts = found.parts(require_ids(found.spec, ids))
            answers = self._calls.run(
                {part.shard: partial(self._sources[part.shard].read_rows, table, part.ids) for part in parts}
            )
        read = {part.shard: answers[part.shard] for part in parts}
        if not found.whole_rows:
            return found.joined(list(read.values()))
        blocks = [replace(block, ids=found.whole_ids(shard, block.ids)) for shard, block in read.items()]
        return blocks[0] if len(blocks) == 1 else _in_order_of(ids, joined_rows(found.spec, blocks))

    def table_state(self, table: str) -> TableState:
        """The largest counts of all stores, which is enough for each of them; decay and times are the same in each."""
        with self._lock.reading():
            read = self._each(lambda store: store.table_state(table), self._partition(table).holders)
        states = list(read.values())
        counts = [state.admission_counts for state in states if state.admission_counts is not None]
        return TableState(
            np.maximum.reduce(counts) if counts else None, states[0].untouched_decay, states[0].touch_times
        )

    def scan(self, table: str, block_rows: int = 65_536) -> Iterator[RowBlock]:
        """Each block is of one version; a commit between two blocks shows in the later one."""
        found = self._partition(table)
        block_rows = require_block_rows(block_rows)
        return self._scan_rows(found, block_rows) if found.whole_rows else self._scan_columns(found, block_rows)

    def _scan_rows(self, table: Partition, block_rows: int) -> Iterator[RowBlock]:
        """One store after the other."""
        for store in table.holders:
            blocks = self._sources[store].scan(table.spec.name, block_rows)
            while True:
                with self._lock.reading():
                    block = self._calls.run({store: partial(next, blocks, None)})[store]
                if block is None:
                    break
                yield replace(block, ids=table.whole_ids(store, block.ids))

    def _scan_columns(self, table: Partition, block_rows: int) -> Iterator[RowBlock]:
        """The blocks of the first store, joined with the same rows of the others.

        Stores of one kind hold rows in the same order and are scanned in parallel. As soon as their blocks differ, the
        other stores are asked for the ids of the first one.
        """
        name, (first, *others) = table.spec.name, table.holders
        scans = {store: self._sources[store].scan(name, block_rows) for store in table.holders}
        alike = True
        while True:
            with self._lock.reading():
                asked = table.holders if alike else (first,)
                found = self._calls.run({store: partial(next, scans[store], None) for store in asked})
                leading = found[first]
                if leading is None:
                    return
                blocks = [block for store in others if (block := found.get(store)) is not None]
                alike = len(blocks) == len(others) and all(np.array_equal(block.ids, leading.ids) for block in blocks)
                if not alike:
                    read = self._each(partial(_read_rows, name, leading.ids), others)
                    leading, blocks = _common(leading, [read[store] for store in others])
            if len(leading.ids):
                yield table.joined([leading, *blocks])


def total_rows(table: Partition, counts: Mapping[int, int]) -> int:
    """The rows of a table by the counts of its stores: with the encoding partition each store counts the same rows."""
    return sum(counts.values()) if table.whole_rows else next(iter(counts.values()))


def total_statistics(table: Partition, parts: Mapping[int, TableStatistics]) -> TableStatistics:
    """The statistics of a table by those of its stores."""
    counts = {
        name: total_rows(table, {store: getattr(of, name) for store, of in parts.items()})
        for name in ("rows", "refused", "evicted", "deleted", "written")
    }
    sizes = [of.bytes for of in parts.values() if of.bytes is not None]
    return TableStatistics(bytes=sum(sizes) if len(sizes) == len(parts) else None, **counts)


def _read_rows(table: str, ids: Int64, store: Snapshot) -> RowBlock:
    return store.read_rows(table, ids)


def _in_order_of(ids: Int64, block: RowBlock) -> RowBlock:
    """The block's rows in the order of `ids`."""
    order = np.argsort(ids, kind="stable")
    positions = order[np.searchsorted(ids, block.ids, sorter=order)]
    return chosen_rows(block, np.argsort(positions, kind="stable"))


def _common(leading: RowBlock, others: list[RowBlock]) -> tuple[RowBlock, list[RowBlock]]:
    """The rows that all of them have; some may have been cleared since the first was read."""
    if all(len(block.ids) == len(leading.ids) for block in others):
        return leading, others
    ids: Int64 = leading.ids
    for block in others:
        ids = ids[np.isin(ids, block.ids)]
    return chosen_rows(leading, np.isin(leading.ids, ids)), [
        chosen_rows(block, np.isin(block.ids, ids)) for block in others
    ]
