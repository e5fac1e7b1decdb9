"""A table as its readers see it: rows that have changed since the last flush are in memory, all others in the tier."""

from __future__ import annotations

from typing import Self

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int64, UInt8
from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.tier import Records
from elastable.embedding_store.engine.memory_table import MemoryTable
from elastable.embedding_store.engine.table_rows import resident_rows
from elastable.embedding_store.engine.tiered.store_state import KeptTable
from elastable.embedding_store.engine.tiered.tier_records import RecordLayout, RowParts
from elastable.embedding_store.log.changes import TableImages
from elastable.embedding_store.native.ids.id_index import IdIndex
from elastable.embedding_store.native.slab import anonymous_slab

__all__ = ["FollowedTable"]


class FollowedTable(MemoryTable):
    """Changes of the log are applied to it as to any table in memory.

    It holds the rows that they have written, and knows which ones they have deleted. Callers do the locking.

    Attributes:
        tier_name: Of the table in the tier; None: none of its rows are there.
    """

    def __init__(self, spec: TableSpec, tier_name: str | None = None) -> None:
        """A table without changes. Raises `BadSpec` for an optimizer that is not known here."""
        self.tier_name = tier_name
        self._gone = IdIndex()
        super().__init__(spec, direct_bytes=0)

    @classmethod
    def of(cls, saved: KeptTable, in_tier: bool) -> Self:
        """As a store's state says; `in_tier`: whether it has rows there. Raises `StoreFailed` where it is corrupt."""
        table = cls(saved.spec, saved.stored if in_tier else None)
        table.put_state(saved.state)
        if saved.steps is not None and table.replay is not None:
            table.replay.steps.restore(saved.steps)
        return table

    @property
    def changes(self) -> int:
        """Rows that are in memory, and rows that are known to be deleted."""
        return self.count + self._gone.count

    @property
    def moves(self) -> bool:
        """Whether steps move rows that they do not update, or shrink rows that were never updated."""
        form = None if self.replay is None else self.replay.steps.form
        return form is not None and bool(form.moves_weights or form.decay)

    def wanted(self, ids: Int64) -> Records | None:
        """What to ask the tier for, to read the rows of `ids` int64 `[n]`, which may repeat; None: nothing."""
        if self.tier_name is None:
            return None
        once = np.unique(ids)
        once = once[~(self._known(once) | self._deleted_now(once))]
        if not len(once):
            return None
        width = self.spec.weight_bytes + (4 * (self.slot_width + 1) if self.replay is not None else 0)
        return Records(self.tier_name, once, np.arange(len(once)), np.empty((len(once), width), np.uint8))

    def complete(self, ids: Int64, wanted: Records | None, missing: Int64 | None) -> Float32:
        """The rows of `ids` int64 `[n]`: float32 `[n, dim]`.

        Args:
            ids: Checked.
            wanted: What `wanted` gave of them earlier, read.
            missing: Indices of those that the tier has no record of.
        """
        out = np.empty((len(ids), self.spec.dim), np.float32)
        self.read(ids, out)
        if wanted is None or missing is None or wanted.table != self.tier_name:
            return out
        there = np.ones(len(wanted.ids), np.bool_)
        there[missing] = False
        places = np.minimum(np.searchsorted(wanted.ids, ids), len(wanted.ids) - 1)
        stored = (wanted.ids[places] == ids) & there[places] & ~self._known(ids) & ~self._deleted_now(ids)
        if stored.any():
            out[stored] = self._numbers(wanted.rows)[places[stored]]
        return out

    def put(self, block: RowBlock) -> None:
        self._gone.remove(block.ids)
        super().put(block)

    def put_images(self, images: TableImages, version: int) -> None:
        super().put_images(images, version)
        self._gone.remove(images.ids)

    def clear(self) -> None:
        self.tier_name = None
        self._gone.clear()
        super().clear()

    def follow(self, step: int, learning_rate: float, ends_chapter: bool) -> None:
        """As in `MemoryTable.follow`; no step is forgotten, as rows in the tier may be far behind."""
        if self.replay is not None:
            self.replay.steps.take(step, learning_rate, ends_chapter)

    def _take_away(self, ids: Int64) -> int:
        once = np.unique(ids)
        self._gone.reserve(len(once))
        self._gone.claim(once, np.empty(len(once), np.int64))
        return super()._take_away(ids)

    def _known(self, ids: Int64) -> npt.NDArray[np.bool_]:
        positions = np.empty(len(ids), np.int64)
        self.directory.find(ids, positions)
        return positions >= 0

    def _deleted_now(self, ids: Int64) -> npt.NDArray[np.bool_]:
        positions = np.empty(len(ids), np.int64)
        self._gone.find(ids, positions)
        return positions >= 0

    def _numbers(self, records: UInt8) -> Float32:
        """What the first bytes of records say: float32 `[n, dim]`."""
        if self.spec.dtype == "float32" and self.replay is None:
            return records.view(np.float32)
        parts = RowParts(anonymous_slab)
        make = resident_rows(parts)
        if self.replay is not None:
            make = self.replay.rows(make)
        rows, order = make(self.spec, self.optimizer, len(records)), np.arange(len(records))
        RecordLayout(parts.slabs, with_touches=False).unpack(records, order, parts.slabs, order)
        out = np.empty((len(records), self.spec.dim), np.float32)
        rows.read(order, out)
        return out
