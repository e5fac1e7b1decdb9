"""Rows that are not in memory, read from what lookups have read before, or from the tier."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64, UInt8
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.frames.framed_gather import NOWHERE, ColdSource
from elastable.embedding_store.engine.frames.near_rows import NearRows
from elastable.embedding_store.engine.frames.record_layout import RecordLayout, RowParts
from elastable.embedding_store.engine.frames.stored_table import StoredTable
from elastable.embedding_store.engine.table_rows import ResidentRows
from elastable.embedding_store.native.slab import anonymous_slab
from elastable.embedding_store.optimizers.base import RowOptimizer

__all__ = ["ColdRows"]

_SCRATCH_ROWS = 1 << 13


class ColdRows:
    """Reads rows of one table. Many threads may, at the same time."""

    def __init__(
        self, spec: TableSpec, optimizer: RowOptimizer, behind: StoredTable, layout: RecordLayout, near: NearRows
    ) -> None:
        """`behind`: the table in its tier; `near`: records that lookups have read."""
        self._spec, self._optimizer, self._behind = spec, optimizer, behind
        self._layout, self._near = layout, near

    def read(self, positions: Int64, cold: Int64, out: Float32) -> None:
        """Rows `positions[cold]` into `out[cold]`, float32 `[n, dim]`, whose rows may lie apart."""
        if self._spec.dtype == "float32" and not self._behind.far:
            out[cold] = self._behind.read(positions[cold], self._layout.slots_at).view(np.float32)
            return
        for some, scratch in self.rows(positions, cold):
            rows = np.empty((len(some), self._spec.dim), np.float32)
            scratch.read(np.arange(len(some)), rows)
            out[some] = rows

    def source(self, out: Float32) -> ColdSource:
        """What a gather into `out` float32 `[n, dim]` reads cold rows from on the way."""
        width = self._layout.slots_at
        if self._spec.dtype != "float32" or not out.flags.c_contiguous:
            return NOWHERE
        records = self._behind.mapped()
        if records is None or records.first != width or out.shape[1] * out.itemsize != width:
            return NOWHERE
        return ColdSource(records, self._behind.row_ids(), out.view(np.uint8).reshape(-1))

    def rows(self, positions: Int64, cold: Int64, whole: bool = False) -> Iterator[tuple[Int64, ResidentRows]]:
        """Rows that are not in memory, some at a time, in the first rows of a scratch, and their indices."""
        if not len(cold):
            return
        left = np.ones(len(cold), np.bool_)
        for indices, records, places in self._near.find(positions[cold]):
            if not whole or records.shape[1] == self._layout.record_bytes:
                left[indices] = False
                yield from self.in_scratch(cold[indices], records, places)
        absent = cold[left]
        if len(absent):
            once, places = np.unique(positions[absent], return_inverse=True)
            records = self._behind.read(once, self._layout.record_bytes if whole else self._layout.slots_at)
            yield from self.in_scratch(absent, records, places.reshape(-1))

    def in_scratch(self, cold: Int64, records: UInt8, places: Int64) -> Iterator[tuple[Int64, ResidentRows]]:
        """Of records uint8 `[m, bytes]` those at `places` int64 `[n]`, some at a time, with their part of `cold`."""
        parts = RowParts(anonymous_slab)
        scratch = ResidentRows(self._spec, self._optimizer, min(len(cold), _SCRATCH_ROWS), parts)
        for start in range(0, len(cold), _SCRATCH_ROWS):
            some = places[start : start + _SCRATCH_ROWS]
            self._layout.unpack(records, some, parts.slabs, np.arange(len(some)))
            yield cold[start : start + _SCRATCH_ROWS], scratch
