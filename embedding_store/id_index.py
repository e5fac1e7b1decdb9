"""A hash index from any int64 id to the position of its row."""

from __future__ import annotations

import numpy as np

from embedding_store.kernel import kernel, prefetch
from embedding_store.row_directory import RowDirectory
from embedding_store.slab import Slab, SlabMaker, anonymous_slab
from embedding_store.store import Int64

__all__ = ["IdIndex"]

_FIRST_CELLS = 1 << 10
_AHEAD = 12


class IdIndex(RowDirectory):
    """Rows in first-come order, found by open addressing with linear probing.

    A cell is two int64: the id, and its position + 1 (0: the cell is free, so
    fresh memory is an empty index). Cells are a power of two, at most half of
    them taken. Ids are never removed one by one.
    """

    _cells: Slab
    _ids: Slab
    """The id at each position."""

    def __init__(self, new_slab: SlabMaker = anonymous_slab) -> None:
        self._new_slab = new_slab
        self.clear()

    @property
    def capacity(self) -> int:
        """Ids that there is room for now."""
        return len(self._ids.array)

    def find(self, ids: Int64, positions: Int64) -> int:
        """As in `RowDirectory.find`."""
        return int(_find(self._cells.array, ids, positions))

    def reserve(self, more: int) -> None:
        """As in `RowDirectory.reserve`; room is doubled, so growing is cheap in the mean."""
        needed = self.count + more
        if needed <= self.capacity:
            return
        cells = self._new_slab("cells", 1 << (2 * needed - 1).bit_length(), 2, np.int64)
        self._ids.grow(len(cells.array) // 2)
        _insert(cells.array, self._ids.array[: self.count, 0])
        self._cells = cells

    def places(self, ids: Int64) -> Int64:
        """As in `RowDirectory.places`: positions are given one after the other."""
        return np.arange(self.count, self.count + len(ids))

    def claim(self, ids: Int64, positions: Int64) -> Int64:
        """As in `RowDirectory.claim`."""
        fresh = np.empty(len(ids), np.int64)
        count = _claim(self._cells.array, self._ids.array[:, 0], self.count, ids, positions, fresh)
        self.count += count
        return fresh[:count]

    def scan(self, cursor: int, limit: int) -> tuple[Int64, Int64, int]:
        """As in `RowDirectory.scan`, in first-come order; the cursor is the next position."""
        stop = min(self.count, cursor + limit)
        return self._ids.array[cursor:stop, 0].copy(), np.arange(cursor, stop), max(cursor, stop)

    def clear(self) -> None:
        """As in `RowDirectory.clear`; the memory is given back."""
        self.count = 0
        self._cells = self._new_slab("cells", _FIRST_CELLS, 2, np.int64)
        self._ids = self._new_slab("ids", _FIRST_CELLS // 2, 1, np.int64)


@kernel
def _first_cell(wanted: int, mask: np.uint64) -> np.uint64:
    """The finalizer of splitmix64 (Steele, Lea, Flood: OOPSLA 2014), cut to the cells there are."""
    h = np.uint64(wanted)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (h ^ (h >> np.uint64(31))) & mask


@kernel
def _find(cells: Int64, ids: Int64, positions: Int64) -> int:
    mask = np.uint64(len(cells) - 1)
    missing = 0
    for i in range(len(ids)):
        prefetch(cells, _first_cell(ids[min(i + _AHEAD, len(ids) - 1)], mask))
        wanted = ids[i]
        cell = _first_cell(wanted, mask)
        while cells[cell, 1] != 0 and cells[cell, 0] != wanted:
            cell = (cell + np.uint64(1)) & mask
        positions[i] = cells[cell, 1] - 1
        missing += positions[i] < 0
    return missing


@kernel
def _claim(cells: Int64, row_ids: Int64, count: int, ids: Int64, positions: Int64, fresh: Int64) -> int:
    mask = np.uint64(len(cells) - 1)
    before = count
    for i in range(len(ids)):
        prefetch(cells, _first_cell(ids[min(i + _AHEAD, len(ids) - 1)], mask))
        wanted = ids[i]
        cell = _first_cell(wanted, mask)
        while cells[cell, 1] != 0 and cells[cell, 0] != wanted:
            cell = (cell + np.uint64(1)) & mask
        if cells[cell, 1] == 0:
            row_ids[count] = wanted
            fresh[count - before] = i
            count += 1
            cells[cell, 0] = wanted
            cells[cell, 1] = count
        positions[i] = cells[cell, 1] - 1
    return count - before


@kernel
def _insert(cells: Int64, row_ids: Int64) -> None:
    """Fills empty cells with ids that differ; row_ids[p] lies at position p."""
    mask = np.uint64(len(cells) - 1)
    for p in range(len(row_ids)):
        prefetch(cells, _first_cell(row_ids[min(p + _AHEAD, len(row_ids) - 1)], mask))
        cell = _first_cell(row_ids[p], mask)
        while cells[cell, 1] != 0:
            cell = (cell + np.uint64(1)) & mask
        cells[cell, 0] = row_ids[p]
        cells[cell, 1] = p + 1
