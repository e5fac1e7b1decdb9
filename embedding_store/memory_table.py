"""One table in memory: a directory of its ids, and slabs of weights and slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embedding_store.id_index import IdIndex
from embedding_store.initial_values import write_initial_rows
from embedding_store.range_pool import RangePool
from embedding_store.row_directory import DirectRows, RowDirectory
from embedding_store.row_optimizer import row_optimizer
from embedding_store.row_values import Float32Rows, RowValues
from embedding_store.slab import Slab, SlabMaker, anonymous_slab
from embedding_store.spec import TableSpec
from embedding_store.store import Float32, Int64, RowBlock, TableUpdate

__all__ = ["MemoryTable", "StagedUpdate"]

_FRESH_A_THREAD = 1 << 12


@dataclass(frozen=True, slots=True)
class StagedUpdate:
    """An update that cannot fail any more.

    Attributes:
        update: The validated gradients.
        block: New rows, where the optimizer is not fused and has run already.
        positions: int64 `[u]`, filled in when rows are claimed.
    """

    update: TableUpdate
    block: RowBlock | None
    positions: Int64


class MemoryTable:
    """The rows of one table. Ids handed in have been checked; callers do the locking.

    A fixed table whose rows all fit into `direct_bytes` keeps row i at
    position i. Any other keeps rows in first-come order behind a hash index,
    so that memory grows with the rows that were touched and not with the pages
    that they would be strewn over.
    """

    def __init__(self, spec: TableSpec, direct_bytes: int, new_slab: SlabMaker = anonymous_slab) -> None:
        """Raises `BadSpec` for an optimizer that is not known here."""
        self.spec = spec
        self._new_slab = new_slab
        self.optimizer = row_optimizer(spec.optimizer)
        self.slot_width = self.optimizer.slot_width(spec.dim)
        self._initial_slots = self.optimizer.initial_slots(spec.dim)
        row_bytes = 4 * (spec.dim + self.slot_width)
        size = spec.vocabulary_size
        self._direct = size if size is not None and size * row_bytes <= direct_bytes else None
        self._directory, self._weights, self._slots = self._empty()

    @property
    def count(self) -> int:
        """Rows that hold a value of their own."""
        return self._directory.count

    def read(self, ids: Int64, out: Float32) -> None:
        """Rows of `ids` int64 `[n]` into `out` float32 `[n, dim]`; writes nothing else."""
        positions = np.empty(len(ids), np.int64)
        missing = self._directory.find(ids, positions)
        if missing < len(ids):
            self._weights.read(positions, out)
        if missing:
            unseen = np.flatnonzero(positions < 0)
            write_initial_rows(self.spec, ids[unseen], unseen, out)

    def stage(self, update: TableUpdate, step: int, learning_rate: float) -> StagedUpdate:
        """Does everything about an update that can fail, and changes no row.

        Raises:
            MemoryError: no room for new rows.
            Exception: whatever an optimizer that is not fused raises.
        """
        block = None
        if not self.optimizer.fused:
            block = self._block(update.ids)
            order = np.arange(len(update.ids))
            squares = update.row_squares
            self.optimizer.apply_columns(
                block.weights, block.slots, order, update.gradients, squares, step, learning_rate
            )
        self._reserve(len(update.ids))
        return StagedUpdate(update, block, np.empty(len(update.ids), np.int64))

    def claim(self, staged: StagedUpdate, pool: RangePool) -> None:
        """Gives every id of the update a row, with initial values where it is new."""
        ids, positions = staged.update.ids, staged.positions
        fresh = self._directory.claim(ids, positions)
        if staged.block is None and len(fresh):
            fresh_ids, fresh_rows = ids[fresh], positions[fresh]

            def initialise(start: int, stop: int) -> None:
                rows = fresh_rows[start:stop]
                self._weights.initialise(fresh_ids[start:stop], rows)
                self._slots.array[rows] = self._initial_slots

            pool.run(initialise, len(fresh), _FRESH_A_THREAD)

    def apply(self, staged: StagedUpdate, start: int, stop: int, step: int, learning_rate: float) -> None:
        """Updates the claimed rows `start..stop` of the update; ranges may run on different threads."""
        positions, slots = staged.positions[start:stop], self._slots.array
        if staged.block is None:
            ids, gradients = staged.update.ids[start:stop], staged.update.gradients[start:stop]
            squares = None if staged.update.row_squares is None else staged.update.row_squares[start:stop]
            self._weights.update(self.optimizer, slots, ids, positions, gradients, squares, step, learning_rate)
        else:
            self._weights.write(positions, staged.block.weights[start:stop])
            slots[positions] = staged.block.slots[start:stop]

    def put(self, block: RowBlock) -> None:
        """Writes rows as they are. Raises `MemoryError` before anything is changed."""
        self._reserve(len(block.ids))
        positions = np.empty(len(block.ids), np.int64)
        self._directory.claim(block.ids, positions)
        self._weights.write(positions, block.weights)
        self._slots.array[positions] = block.slots

    def scan(self, cursor: int, limit: int) -> tuple[RowBlock, int]:
        """The next block of rows from `cursor` (first 0), and the next cursor; an empty block ends it."""
        ids, positions, cursor = self._directory.scan(cursor, limit)
        weights = np.empty((len(ids), self.spec.dim), np.float32)
        self._weights.read(positions, weights)
        return RowBlock(ids, weights, self._slots.array[positions]), cursor

    def clear(self) -> None:
        """Forgets every row and gives the memory back."""
        self._directory, self._weights, self._slots = self._empty()

    def _empty(self) -> tuple[RowDirectory, RowValues, Slab]:
        new_slab = self._new_slab
        directory = IdIndex(new_slab) if self._direct is None else DirectRows(self._direct, new_slab)
        rows = directory.capacity
        return directory, Float32Rows(self.spec, rows, new_slab), new_slab("slots", rows, self.slot_width)

    def _reserve(self, more: int) -> None:
        self._directory.reserve(more)
        self._weights.grow(self._directory.capacity)
        self._slots.grow(self._directory.capacity)

    def _block(self, ids: Int64) -> RowBlock:
        """A copy of the rows of `ids`, initial ones for those that have none."""
        weights = np.empty((len(ids), self.spec.dim), np.float32)
        self.read(ids, weights)
        positions = np.empty(len(ids), np.int64)
        self._directory.find(ids, positions)
        slots = np.tile(self._initial_slots, (len(ids), 1))
        live = positions >= 0
        slots[live] = self._slots.array[positions[live]]
        return RowBlock(ids, weights, slots)
