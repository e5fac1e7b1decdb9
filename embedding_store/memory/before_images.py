"""Rows of a table as they were at one version: those that have changed since."""

from __future__ import annotations

import numpy as np

from embedding_store.catch_up.table_steps import TableSteps
from embedding_store.memory.id_index import IdIndex
from embedding_store.memory.row_gather import can_stream, gather
from embedding_store.memory.row_touches import UInt32
from embedding_store.memory.slab import Slab
from embedding_store.memory.table_rows import TableRows
from embedding_store.range_pool import RangePool
from embedding_store.spec import TableSpec
from embedding_store.store import Float32, Int64, UInt8

__all__ = ["BeforeImages"]

_FOUND_A_THREAD = 1 << 14
_COPIED_A_THREAD = 1 << 12
_INDEX_BYTES = 33  # of a row, at most
_FIRST_BYTES = 64 << 10  # of an index of few rows
_POSITION, _SEQUENCE = 0, 1


class BeforeImages:
    """What of a table has changed since a version was pinned, as it was then. Callers do the locking.

    An image is a row with its slots and touches, or that there was none. It is
    taken at the first change, and stays as long as this does.

    Attributes:
        count: Rows that the table had at that version.
        step: The step that rows had followed then, and oldest_step the oldest one that images may refer to, of a
            table whose rows follow steps.
        sightings: The sketch of the table's admission as it was; None: as it is.
        frequencies: How often rows were touched, by position, before an
            eviction last began to count anew, and the number of that change in
            the table's sequence; None: no eviction has.
    """

    def __init__(self, spec: TableSpec, slot_width: int, count: int, steps: TableSteps | None = None) -> None:
        self.count = count
        self.step = None if steps is None else steps.now
        self.oldest_step = None if steps is None else steps.first
        self.sightings: UInt8 | None = None
        self.frequencies: tuple[int, UInt32] | None = None
        self._dim, self._slot_width = spec.dim, slot_width
        self._touched = spec.eviction is not None
        self._row_bytes = 4 * (self._dim + self._slot_width) + 16 + (16 if self._touched else 0)
        self._index: IdIndex | None = None  # memory is taken with the first image

    @property
    def rows(self) -> int:
        """Images."""
        return 0 if self._index is None else self._index.count

    def room(self, more: int) -> int:
        """Bytes that `more` further images take at most."""
        return more * (self._row_bytes + _INDEX_BYTES) + (_FIRST_BYTES if self._index is None else 0)

    @property
    def bytes(self) -> int:
        """Bytes of memory that this takes."""
        apart = 0 if self.sightings is None else self.sightings.nbytes
        apart += 0 if self.frequencies is None else self.frequencies[1].nbytes
        if self._index is None:
            return apart
        return apart + self._index.bytes + self.rows * self._row_bytes

    @property
    def ids(self) -> Int64:
        """int64 `[rows]`, of every image, in the order in which they were taken. A view, to read."""
        return np.empty(0, np.int64) if self._index is None else self._index.row_ids

    @property
    def positions(self) -> Int64:
        """int64 `[rows]`: where in the table the row lay; -1: there was none. A view, to read."""
        return np.empty(0, np.int64) if self._index is None else self._origins.array[: self.rows, _POSITION]

    @property
    def sequences(self) -> Int64:
        """int64 `[rows]`: the number in the table's sequence of changes of the row's first one. A view, to read."""
        return np.empty(0, np.int64) if self._index is None else self._origins.array[: self.rows, _SEQUENCE]

    @property
    def touches(self) -> Int64:
        """int64 `[rows, 2]`, `RowBlock.touches` of a table with eviction. A view, to read."""
        touches: Int64 = self._touches.array[: self.rows]
        return touches

    def find(self, ids: Int64, places: Int64) -> int:
        """Writes which image is each id's into `places` int64 `[n]`, -1 for none; returns how many have none."""
        if self._index is None:
            places[:] = -1
            return len(ids)
        return self._index.find(ids, places)

    def strangers(self, ids: Int64, pool: RangePool) -> Int64:
        """int64: indices of those of `ids` int64 `[n]` that have no image."""
        if self._index is None:
            return np.arange(len(ids))
        places, missing = np.empty(len(ids), np.int64), list[int]()

        def find(start: int, stop: int) -> None:
            missing.append(self.find(ids[start:stop], places[start:stop]))

        pool.run(find, len(ids), _FOUND_A_THREAD)
        return np.flatnonzero(places < 0) if any(missing) else places[:0]

    def add(self, ids: Int64, positions: Int64, sequence: int, rows: TableRows, touches: Int64 | None, pool: RangePool
            ) -> None:  # fmt: skip
        """Takes images.

        Args:
            ids: int64 `[n]`, each once, none with an image.
            positions: int64 `[n]`, where their rows lie; -1: there is none.
            sequence: Number of the change that is about to happen.
            rows: The table's.
            touches: int64 `[n, 2]`, of tables with eviction.
            pool: Threads to work with.

        Raises:
            MemoryError: there is no room; nothing has changed.
        """
        start, stop = self._claim(ids)
        self._origins.array[start:stop, _POSITION] = positions
        self._origins.array[start:stop, _SEQUENCE] = sequence
        if touches is not None:
            self._touches.array[start:stop] = touches
        weights, slots = self._weights.array[start:stop], self._slots.array[start:stop]
        stream = can_stream(weights)

        def copy(begin: int, end: int) -> None:
            rows.copy(positions[begin:end], weights[begin:end], slots[begin:end], stream)

        pool.run(copy, stop - start, _COPIED_A_THREAD)

    def read(self, places: Int64, out: Float32, stream: bool = False) -> None:
        """Weights of images into `out` float32 `[n, dim]`; rows of `out` at negative places are left alone."""
        if self._index is not None:
            gather(self._weights.array, places, out, stream)

    def block(self, places: Int64) -> tuple[Float32, Float32]:
        """Copies of images, as `TableRows.copy` gave them."""
        return self._weights.array[places], self._slots.array[places]

    def take_over(self, newer: BeforeImages) -> None:
        """Is told that the pin after this one is gone: images that only it has are needed here.

        Raises:
            MemoryError: there is no room; nothing has changed.
        """
        if newer.rows:
            places = np.empty(newer.rows, np.int64)
            self.find(newer.ids, places)
            chosen = np.flatnonzero(places < 0)
            start, stop = self._claim(newer.ids[chosen])
            for ours, theirs in zip(self._slabs(), newer._slabs(), strict=True):
                np.take(theirs.array, chosen, axis=0, out=ours.array[start:stop], mode="clip")
        if self.sightings is None:
            self.sightings = newer.sightings
        if self.frequencies is None:
            self.frequencies = newer.frequencies

    def _claim(self, ids: Int64) -> tuple[int, int]:
        """Places for new images, side by side: the first, and the one after the last."""
        index = self._begun()
        index.reserve(len(ids))
        for slab in self._slabs():
            slab.grow(index.capacity)
        start = index.positions_given
        index.claim(ids, np.empty(len(ids), np.int64))
        return start, index.positions_given

    def _begun(self) -> IdIndex:
        if self._index is None:
            index = IdIndex()
            self._weights = Slab(index.capacity, self._dim)
            self._slots = Slab(index.capacity, self._slot_width)
            self._origins = Slab(index.capacity, 2, np.int64)
            if self._touched:
                self._touches = Slab(index.capacity, 2, np.int64)
            self._index = index
        return self._index

    def _slabs(self) -> list[Slab]:
        return [self._weights, self._slots, self._origins, *([self._touches] if self._touched else [])]
