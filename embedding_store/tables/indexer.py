"""Which ids a batch holds, and where each of them occurs; everything in first-seen order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Int32, Int64
from elastable.embedding_store.errors import BadIds
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.support.scratch import Scratch

__all__ = ["Grouping", "Indexer", "group_ids", "unique_ids"]


_ROWS_LIMIT = 2**31 - 1  # the inverse is int32
_FEWEST_BITS = 4
_CACHED_BITS = 18  # 1 MiB of cells
_MOST_BITS, _BITS_AN_ID = 1 << 23, 1 << 9  # 1 MiB of bits, and no more than are cleared faster than ids are searched
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / the golden ratio


@dataclass(frozen=True, slots=True)
class Grouping:
    """Ids by group; group k holds every occurrence of `ids[k]`.

    Attributes:
        ids: int64 `[u]`, each id once, in first-seen order.
        offsets: int64 `[u + 1]`: group k is `positions[offsets[k]:offsets[k + 1]]`.
        positions: int64 `[n]`, ascending within a group.
        inverse: int32 `[n]`: `ids[inverse[i]]` is the id at position i.
    """

    ids: Int64
    offsets: Int64
    positions: Int64
    inverse: Int32


class Indexer:
    """Groups one batch of ids after the other in the same memory.

    Memory is as much as the largest batch needed: about 50 bytes an id. One
    thread at a time may use an indexer; `group` and `unique` let go of what
    the call before returned.
    """

    def __init__(self) -> None:
        self._cells = Scratch(np.int32)
        self._unique = Scratch(np.int64)
        self._inverse = Scratch(np.int32)
        self._offsets = Scratch(np.int64)
        self._positions = Scratch(np.int64)
        self._seen = Scratch(np.uint64)

    def all_different(self, ids: Int64) -> bool:
        """Whether each of `ids` int64 `[n]` is known to stand once, at a third of the cost of `unique`.

        False also where that cannot be told at this cost: ids that lie further
        apart than bits would stay in a cache, or are few for that. Of ids that
        repeat, the first repetition ends the search.

        Raises:
            BadIds: as `unique`.
        """
        _require_groupable(ids)
        bits = min(_MOST_BITS, _BITS_AN_ID * len(ids))
        return bool(_all_different(np.ascontiguousarray(ids), self._seen.take(-(-bits // 64)), np.uint64(bits)))

    def unique(self, ids: Int64) -> tuple[Int64, Int32]:
        """The id set of a batch, in memory that the next call overwrites.

        Args:
            ids: int64 `[n]`, any values, n < 2**31.

        Returns:
            unique: int64 `[u]`, each id once, in first-seen order.
            inverse: int32 `[n]`, `unique[inverse[i]] == ids[i]`.

        Raises:
            BadIds: not int64 `[n]`, or 2**31 ids or more.
        """
        for whole in self.unique_by_steps(ids, max(1, np.size(ids))):
            return whole
        return np.empty(0, np.int64), np.empty(0, np.int32)

    def unique_by_steps(self, ids: Int64, step: int) -> Iterator[tuple[Int64, Int32]]:
        """As `unique`, `step` ids at a time: the id set of those so far, and where in it each of them stands.

        What came out before stays as it is, so that others may go on with it meanwhile.
        """
        _require_groupable(ids)
        bits = _bits_of_cells(len(ids))
        cells, unique = self._cells.take(1 << bits), self._unique.take(len(ids))
        inverse = self._inverse.take(len(ids))
        ids, count = np.ascontiguousarray(ids), 0
        for start in range(0, len(ids), step):
            stop = min(start + step, len(ids))
            count = _unique(ids, start, stop, count, cells, np.uint64(64 - bits), unique, inverse)
            yield unique[:count], inverse[:stop]

    def group(self, ids: Int64) -> Grouping:
        """Groups ids, in memory that the next call overwrites.

        Args:
            ids: int64 `[n]`, any values, n < 2**31.

        Raises:
            BadIds: not int64 `[n]`, or 2**31 ids or more.
        """
        unique, inverse = self.unique(ids)
        offsets, positions = self._offsets.take(len(unique) + 1), self._positions.take(len(ids))
        _group(inverse, offsets, positions)
        return Grouping(unique, offsets, positions, inverse)


def _require_groupable(ids: Int64) -> None:
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or ids.ndim != 1:
        raise BadIds(f"ids to group must be int64 [n], got {getattr(ids, 'dtype', type(ids).__name__)} "
                     f"{list(np.shape(ids))}")  # fmt: skip
    if len(ids) > _ROWS_LIMIT:
        raise BadIds(f"{len(ids)} ids in one batch: at most {_ROWS_LIMIT} can be grouped")


def _bits_of_cells(ids: int) -> int:
    """The logarithm of how many cells so many ids are searched in.

    At most a quarter of them are taken, or half where a quarter would not stay
    in the processor's second cache: of half-full cells every other search
    meets a taken one, which the processor does not foresee (measured: 65,536
    different ids take twice the time).
    """
    quarter, half = (4 * ids - 1).bit_length(), (2 * ids - 1).bit_length()
    return max(_FEWEST_BITS, half, min(quarter, _CACHED_BITS))


def unique_ids(ids: Int64) -> tuple[Int64, Int32]:
    """The id set of a batch, in memory of its own; else as `Indexer.unique`."""
    unique, inverse = Indexer().unique(ids)
    return unique.copy(), inverse


def group_ids(ids: Int64) -> Grouping:
    """Groups ids, in memory of its own; else as `Indexer.group`."""
    return Indexer().group(ids)


@kernel
def _all_different(ids: Int64, seen: npt.NDArray[np.uint64], bits: np.uint64) -> bool:
    if len(ids) == 0:
        return True
    low = high = ids[0]
    for wanted in ids:
        low, high = min(low, wanted), max(high, wanted)
    span = np.uint64(high) - np.uint64(low)  # never negative, and right also where int64 would overflow
    if span >= bits:
        return False
    seen[: np.int64(span >> np.uint64(6)) + 1] = 0
    for wanted in ids:
        place = np.uint64(wanted) - np.uint64(low)
        bit = np.uint64(1) << (place & np.uint64(63))
        word = seen[place >> np.uint64(6)]
        if word & bit:
            return False
        seen[place >> np.uint64(6)] = word | bit
    return True


@kernel
def _unique(
    ids: Int64, start: int, stop: int, count: int, cells: Int32, shift: np.uint64, unique: Int64, inverse: Int32
) -> int:
    """Open addressing with linear probing; a cell holds a position in `unique`, or -1.

    Goes on with ids `start..stop` where `count` different ones were found before.

    Multiplicative hashing (Knuth, TAOCP 3, 6.4): the upper bits of the product
    spread ids that follow each other, whatever the stride.
    """
    mask = len(cells) - 1
    if start == 0:
        cells[:] = -1
    for i in range(start, stop):
        wanted = ids[i]
        cell = np.int64((np.uint64(wanted) * _GOLDEN) >> shift)
        found = cells[cell]
        while found >= 0 and unique[found] != wanted:
            cell = (cell + 1) & mask
            found = cells[cell]
        if found < 0:
            found = np.int32(count)
            cells[cell] = found
            unique[count] = wanted
            count += 1
        inverse[i] = found
    return count


@kernel
def _group(inverse: Int32, offsets: Int64, positions: Int64) -> None:
    """A counting sort. While it runs, offsets[k + 1] is where the next position of group k goes."""
    offsets[:] = 0
    for k in inverse:
        offsets[k + 1] += 1
    start = 0
    for k in range(1, len(offsets)):
        count = offsets[k]
        offsets[k] = start
        start += count
    for i in range(len(inverse)):
        k = inverse[i] + 1
        positions[offsets[k]] = i
        offsets[k] += 1
