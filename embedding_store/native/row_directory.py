"""Maps ids to the memory of their rows."""

from abc import ABC, abstractmethod

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt64
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.slab import Scratch, Slab, SlabMaker, anonymous_slab

_NO_IDS: Int64 = np.empty(0, np.int64)


class RowDirectory(ABC):
    """Which ids have a row of their own, and at which position of the slabs.

    `find` may run from many threads at once, the rest in one alone.

    Attributes:
        count: Ids that have a row.
        marks: One bit an id for whether it has a row, where that lies at `position = id`; None where it does not.
    """

    count: int
    marks: UInt64 | None = None

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Rows that the slabs of this directory need room for."""

    @property
    @abstractmethod
    def positions_given(self) -> int:
        """Rows of the slabs of this directory that were ever written to."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Bytes of memory that the directory uses."""

    @abstractmethod
    def find(self, ids: Int64, positions: Int64) -> int:
        """Writes each id's position into `positions` int64 `[n]`, -1 for none; returns how many have none."""

    def positions_of(self, ids: Int64) -> Int64:
        """What `find` writes, int64 `[n]`."""
        positions = np.empty(len(ids), np.int64)
        self.find(ids, positions)
        return positions

    @property
    def row_ids(self) -> Int64:
        """int64 `[positions_given]`: the ids by position, a view to read; empty where an id is its position."""
        return _NO_IDS

    @property
    def sound(self) -> bool:
        """Whether what `find` reads can be what a directory wrote; asked where another process wrote it."""
        return True

    @abstractmethod
    def slabs(self) -> tuple[Slab, ...]:
        """What `find` reads, in the order in which the constructor asks for it.

        Another process finds ids through its own directory, made over the very same slabs, while `claim` may be running
        here. So there is nothing else that `find` needs, the constructor writes nothing, and a `find` that meets half
        of a change ends, with whatever positions.
        """

    @abstractmethod
    def reserve(self, more: int) -> None:
        """Makes room for `more` further ids, so that `claim` cannot fail.

        Raises:
            MemoryError: the directory is as it was.
        """

    @abstractmethod
    def places(self, ids: Int64) -> Int64:
        """int64: positions, in any order, that `claim(ids)` may newly give; room must have been reserved.

        Good until the next call of `places`.
        """

    @abstractmethod
    def claim(self, ids: Int64, positions: Int64) -> Int64:
        """As `find`, giving rows to ids that have none; returns their indices in `ids`, int64 `[fresh]`.

        Room must have been reserved. Ids may repeat; the first occurrence is the fresh one. What is returned
        is good until the next call of `claim`.
        """

    @abstractmethod
    def remove(self, ids: Int64) -> int:
        """Takes the rows of `ids` int64 `[n]` away; returns how many there were. Ids may repeat, or have none."""

    @abstractmethod
    def scan(self, cursor: int, limit: int) -> tuple[Int64, Int64, int]:
        """Up to `limit` (>= 1) ids that have a row, from `cursor` on, which starts at 0.

        Returns:
            ids int64 `[n]`, positions int64 `[n]`, and the next cursor; no ids mean that there are no more.
        """

    @abstractmethod
    def clear(self) -> None:
        """Takes every id's row away."""


class DirectRows(RowDirectory):
    """A fixed table's rows at `position = id`, with one bit an id for whether it has one."""

    marks: UInt64

    def __init__(self, size: int, new_slab: SlabMaker = anonymous_slab) -> None:
        self._size = size
        self._new_slab = new_slab
        self._fresh = Scratch(np.int64)
        self.clear()

    @property
    def count(self) -> int:  # type: ignore[override]
        return int(self._count[0])

    @property
    def capacity(self) -> int:
        """The vocabulary size."""
        return self._size

    @property
    def positions_given(self) -> int:
        """Without counting rows that were taken away."""
        return self.count

    @property
    def bytes(self) -> int:
        """One bit an id."""
        return int(self._live.array.nbytes)

    def find(self, ids: Int64, positions: Int64) -> int:
        """Ids must lie in the vocabulary."""
        if self.count == self._size:
            positions[:] = ids
            return 0
        return int(_find(self.marks, ids, positions))

    def slabs(self) -> tuple[Slab, ...]:
        return (self._live,)

    def reserve(self, more: int) -> None:
        """There is always room."""

    def places(self, ids: Int64) -> Int64:
        """The ids themselves."""
        return ids

    def claim(self, ids: Int64, positions: Int64) -> Int64:
        fresh = self._fresh.take(len(ids))
        count = _claim(self.marks, ids, positions, fresh)
        self._count[0] += np.uint64(count)
        return fresh[:count]

    def remove(self, ids: Int64) -> int:
        """Ids must lie in the vocabulary."""
        count = int(_remove(self.marks, ids))
        self._count[0] -= np.uint64(count)
        return count

    def scan(self, cursor: int, limit: int) -> tuple[Int64, Int64, int]:
        """In ascending order; the cursor is the next id."""
        ids = np.empty(limit, np.int64)
        count, cursor = _scan(self.marks, cursor, self._size, ids)
        return ids[:count], ids[:count], cursor

    def clear(self) -> None:
        # A bit an id, and how many of them are set: who reads them from another process asks for that, too.
        self._live = self._new_slab("live", -(-self._size // 64) + 1, 1, np.uint64)
        self.marks = self._live.array[:-1, 0]
        self._count: UInt64 = self._live.array[-1]


@kernel
def _find(live: UInt64, ids: Int64, positions: Int64) -> int:
    missing = 0
    for i in range(len(ids)):
        row = ids[i]
        if (live[row >> 6] >> np.uint64(row & 63)) & np.uint64(1):
            positions[i] = row
        else:
            positions[i] = -1
            missing += 1
    return missing


@kernel
def _claim(live: UInt64, ids: Int64, positions: Int64, fresh: Int64) -> int:
    count = 0
    for i in range(len(ids)):
        row = ids[i]
        bit = np.uint64(1) << np.uint64(row & 63)
        if not live[row >> 6] & bit:
            live[row >> 6] |= bit
            fresh[count] = i
            count += 1
        positions[i] = row
    return count


@kernel
def _remove(live: UInt64, ids: Int64) -> int:
    count = 0
    for i in range(len(ids)):
        row = ids[i]
        bit = np.uint64(1) << np.uint64(row & 63)
        if live[row >> 6] & bit:
            live[row >> 6] ^= bit
            count += 1
    return count


@kernel
def _scan(live: UInt64, cursor: int, size: int, ids: Int64) -> tuple[int, int]:
    count = 0
    while cursor < size and count < len(ids):
        word = live[cursor >> 6] >> np.uint64(cursor & 63)
        if word == 0:
            cursor = ((cursor >> 6) + 1) << 6
            continue
        if word & np.uint64(1):
            ids[count] = cursor
            count += 1
        cursor += 1
    return count, cursor
