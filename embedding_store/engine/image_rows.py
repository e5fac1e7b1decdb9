"""Memory for before-images: rows side by side in the order in which they came, and which of them is an id's."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.native.id_index import IdIndex
from elastable.embedding_store.native.slab import Slab

__all__ = ["ImageRows", "first_bytes"]

_INDEX_BYTES = 33  # of a row, at most
_FIRST_BYTES = 64 << 10  # of an index of few rows


class ImageRows:
    """Rows that are added, found and all forgotten together; memory that was used once is used again.

    Attributes:
        weights, slots: float32 slabs.
        origins: int64 slab of two columns.
        touches: int64 slab of two columns, of tables with eviction; else of none.
    """

    def __init__(self, spec: TableSpec, slot_width: int, direct: int | None) -> None:
        """`direct`: the size of a table whose ids lie below it, so that they are found without an index.

        Raises:
            MemoryError: the system refuses the address space.
        """
        self._index = IdIndex() if direct is None else _DirectPlaces(direct)
        rows = self._index.capacity
        touches = 0 if spec.eviction is None else 2
        self.weights, self.slots = Slab(rows, spec.dim), Slab(rows, slot_width)
        self.origins, self.touches = Slab(rows, 2, np.int64), Slab(rows, touches, np.int64)
        self._row_bytes = 4 * (spec.dim + slot_width) + 16 + 8 * touches
        self._highest = 0

    @property
    def count(self) -> int:
        """Rows that there are."""
        return self._index.count

    @property
    def ids(self) -> Int64:
        """int64 `[count]`. A view, to read."""
        return self._index.row_ids

    @property
    def slabs(self) -> tuple[Slab, ...]:
        """All of them."""
        return self.weights, self.slots, self.origins, self.touches

    @property
    def bytes(self) -> int:
        """Bytes of memory that this takes, also where it was used before and is not now."""
        return self._index.bytes + max(self._highest, self.count) * self._row_bytes

    def room(self, more: int) -> int:
        """Bytes that `more` further rows take at most."""
        return max(0, self.count + more - max(self._highest, self.count)) * (self._row_bytes + _INDEX_BYTES)

    def find(self, ids: Int64, places: Int64) -> int:
        """As `RowDirectory.find`."""
        return self._index.find(ids, places)

    def add(self, ids: Int64) -> tuple[int, int]:
        """Rows for `ids` int64 `[n]`, each once, which have none: the first one, and the one after the last.

        Raises:
            MemoryError: there is no room; nothing has changed.
        """
        self._index.reserve(len(ids))
        for slab in self.slabs:
            slab.grow(self._index.capacity)
        start = self.count
        self._index.claim(ids, np.empty(len(ids), np.int64))
        return start, self.count

    def clear(self) -> None:
        """Forgets all rows, and keeps the memory."""
        self._highest = max(self._highest, self.count)
        self._index.clear()


def first_bytes(direct: int | None) -> int:
    """Bytes that the first row of some `ImageRows` takes beside itself."""
    return _FIRST_BYTES if direct is None else 8 * direct


class _DirectPlaces:
    """As `IdIndex`, for ids from 0 to a size, of rows that are never taken away one by one."""

    def __init__(self, size: int) -> None:
        self._places = Slab(size, 1, np.int64)  # 1 + the place; 0: none
        self._ids = Slab(512, 1, np.int64)
        self.count = 0

    @property
    def capacity(self) -> int:
        return len(self._ids.array)

    @property
    def row_ids(self) -> Int64:
        ids: Int64 = self._ids.array[: self.count, 0]
        return ids

    @property
    def bytes(self) -> int:
        return int(self._places.array.nbytes) + 8 * self.count

    def find(self, ids: Int64, places: Int64) -> int:
        np.take(self._places.array[:, 0], ids, out=places, mode="clip")
        np.subtract(places, 1, out=places)
        return int(np.count_nonzero(places < 0))

    def reserve(self, more: int) -> None:
        needed = self.count + more
        if needed > self.capacity:
            self._ids.grow(max(needed, self.capacity * 5 // 4))

    def claim(self, ids: Int64, places: Int64) -> None:
        """Places for ids that have none."""
        start, self.count = self.count, self.count + len(ids)
        self._ids.array[start : self.count, 0] = ids
        self._places.array[ids, 0] = np.arange(start + 1, self.count + 1)

    def clear(self) -> None:
        """As in `IdIndex`; the memory is kept."""
        self._places.array[self.row_ids, 0] = 0
        self.count = 0
