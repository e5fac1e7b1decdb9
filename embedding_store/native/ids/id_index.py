"""A hash index from any int64 id to the position of its row."""

from __future__ import annotations

import os

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.native.ids import id_cells, id_growth, id_lines
from elastable.embedding_store.native.ids.row_directory import RowDirectory
from elastable.embedding_store.native.slab import Slab, SlabMaker, anonymous_slab
from elastable.embedding_store.support.scratch import Scratch

__all__ = ["IdIndex"]

_FIRST_ROWS = 512
_MOST_ROWS = 1 << 37  # positions have so many bits
# Of the hash at first. Partitions and shards are chosen by the same hash with seed 0: under that seed all ids of one of
# them would fall together, and rows do come by partition where a tier is read.
_SEED = int.from_bytes(b"elastabl", "little")


class IdIndex(RowDirectory):
    """Rows in first-come order, found by open addressing over lines of the cache (`id_cells`).

    At least half of the cells are in use. With the ids by position a row takes
    33 bytes at most, also while the index grows: it grows by one segment, for
    which some thousand cells move, for every 1,300 new ids, whatever its size.
    Positions of removed ids are given to the next new ones.
    """

    _cells: Slab
    _scratch: id_lines.Cells
    _ids: Slab
    """The id at each position; at a free one, 1 + the next free one."""

    def __init__(self, new_slab: SlabMaker = anonymous_slab) -> None:
        self._new_slab = new_slab
        self._free, self._fresh = Scratch(np.int64), Scratch(np.int64)
        self.clear()

    @property
    def _state(self) -> Int64:
        state: Int64 = self._state_slab.array[:, 0]
        return state

    @property
    def count(self) -> int:  # type: ignore[override]
        return int(self._state[id_lines.COUNT])

    @property
    def capacity(self) -> int:
        """Positions that there is room for now."""
        return len(self._ids.array)

    @property
    def positions_given(self) -> int:
        """Rows beyond were never written to."""
        return int(self._state[id_lines.HIGH])

    @property
    def row_ids(self) -> Int64:
        """int64 `[positions_given]`, the id at each position; at a free one it means nothing. A view, to read."""
        row_ids: Int64 = self._ids.array[: self.positions_given, 0]
        return row_ids

    @property
    def cells_moved(self) -> int:
        """Cells that growth has moved so far."""
        return int(self._state[id_lines.MOVED])

    @property
    def bytes(self) -> int:
        """Lines of all segments, and ids by position."""
        in_cells: int = 64 * int(id_growth.all_lines(self._state))
        return in_cells + 8 * self.positions_given

    def find(self, ids: Int64, positions: Int64) -> int:
        return int(id_cells.find(self._cells.array, self._state, ids, positions))

    @property
    def sound(self) -> bool:
        bits, ways, grown = (int(self._state[word]) for word in (id_lines.BITS, id_lines.WAYS, id_lines.GROWN))
        if not (0 <= bits <= 36 and 2 <= ways <= 3 and 0 <= grown <= 1 << bits):
            return False
        return id_lines.SEGMENT_LINES * ((ways << bits) + grown) <= len(self._cells.array)

    def slabs(self) -> tuple[Slab, ...]:
        return self._state_slab, self._cells, self._ids

    def reserve(self, more: int) -> None:
        """Address space, which takes memory only once it is used."""
        needed = max(self.positions_given, self.count + more)
        if needed > _MOST_ROWS:
            raise MemoryError(f"{needed} rows in one table: the index counts up to {_MOST_ROWS}")
        lines = self._lines_for(self.count + more)
        if not len(self._scratch) and lines > len(self._cells.array):
            self._scratch = np.empty((id_lines.GROUP_LINES, 8), np.uint64)
        self._cells.grow(lines)
        if needed > self.capacity:
            self._ids.grow(max(needed, self.capacity * 5 // 4))

    def places(self, ids: Int64) -> Int64:
        """Free positions, the last one first, and then new ones."""
        positions = self._free.take(len(ids))
        id_cells.free_positions(self._ids.array[:, 0], self._state, positions)
        return positions

    def claim(self, ids: Int64, positions: Int64) -> Int64:
        fresh = self._fresh.take(len(ids))
        count = done = 0
        while True:
            row_ids, state = self._ids.array[:, 0], self._state
            found, done = id_cells.claim(
                self._cells.array, row_ids, state, self._scratch, ids, positions, fresh[count:], done
            )
            count += found
            if done == len(ids) and not id_growth.must_grow(state):
                return fresh[:count]
            self._hash_anew()

    def remove(self, ids: Int64) -> int:
        return int(id_cells.remove(self._cells.array, self._ids.array[:, 0], self._state, ids))

    def scan(self, cursor: int, limit: int) -> tuple[Int64, Int64, int]:
        """By position; the cursor is the next position.

        Rows that are claimed while the scan goes on are seen or not, all others once.
        """
        high = self.positions_given
        while cursor < high:
            stop = min(high, cursor + limit)
            ids, positions = self._ids.array[cursor:stop, 0].copy(), np.arange(cursor, stop)
            cursor = stop
            if self.count < high:
                found = np.empty_like(positions)
                self.find(ids, found)
                # What stands at a free position may be an id, but that id lies elsewhere.
                live = found == positions
                ids, positions = ids[live], positions[live]
            if len(ids):
                return ids, positions, cursor
        return np.empty(0, np.int64), np.empty(0, np.int64), cursor

    def clear(self) -> None:
        """The memory is given back."""
        self._state_slab = self._new_slab("index", id_lines.STATE_WORDS, 1, np.int64)
        if self._state[id_lines.WAYS] == 0:  # memory of nobody else
            self._state[id_lines.WAYS] = 2
            self._state[id_lines.SEED] = _SEED
        self._scratch = np.empty((0, 8), np.uint64)
        self._cells = self._new_slab("cells", 2 * id_lines.SEGMENT_LINES, 8, np.uint64)
        self._ids = self._new_slab("ids", _FIRST_ROWS, 1, np.int64)

    def _lines_for(self, rows: int) -> int:
        """Lines that there must be to grow to so many rows."""
        state = self._state.copy()
        while rows > id_growth.rows_before_growth(state):
            state[id_lines.GROWN] = (1 << state[id_lines.BITS]) - 1
            if rows <= id_growth.rows_before_growth(state):
                break
            id_growth.next_size(state)
        return int(id_growth.all_lines(state)) + id_lines.SEGMENT_LINES

    def _hash_anew(self) -> None:
        """Somebody has found ids that fall together: under a seed that nobody knows they are strewn again."""
        while True:
            state = self._state.copy()
            state[id_lines.SEED] = int.from_bytes(os.urandom(8), "little", signed=True)
            cells = self._new_slab("cells", len(self._cells.array), 8, np.uint64)
            if id_growth.refill(self._cells.array, cells.array, state):
                self._cells = cells
                self._state[:] = state
                return
