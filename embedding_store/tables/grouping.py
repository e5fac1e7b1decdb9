"""Sums of the gradients of each id, over one batch or many.

Ids are in first-seen order and every sum is a left fold in the order of occurrence, in float32. Threads own disjoint
ranges of unique ids, so results are the same to the bit for any number of threads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int32, Int64
from elastable.embedding_store.contract.row_data import TableUpdate
from elastable.embedding_store.errors import BadGradient, BadIds
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.range_pool import SERIAL, RangePool, shared_pool
from elastable.embedding_store.native.slab import Scratch
from elastable.embedding_store.tables.checks import array_kind

# Which ids a batch holds, and where each of them occurs; everything in first-seen order


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

    Memory is as much as the largest batch needed: about 50 bytes an id. One thread at a time may use an indexer;
    `group` and `unique` let go of what the call before returned.
    """

    def __init__(self) -> None:
        self._cells = Scratch(np.int32)
        self._unique = Scratch(np.int64)
        self._inverse = Scratch(np.int32)
        self._offsets = Scratch(np.int64)
        self._positions = Scratch(np.int64)
        self._seen = Scratch(np.uint64)

    def all_different(self, ids: Int64) -> bool:
        """Whether each of `ids` int64 `[n]` is known to occur once, at a third of the cost of `unique`.

        False also where that cannot be known at this cost: ids that lie further apart than bits would stay in a cache,
        or are few for that. Of ids that repeat, the first repetition ends the search.

        Raises:
            BadIds: as `unique`.
        """
        if type(ids) is not np.ndarray or ids.dtype != np.int64 or ids.ndim != 1 or len(ids) > _ROWS_LIMIT:
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
        """As `unique`, `step` ids at a time: the id set of those so far, and where in it each of them is.

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
        raise BadIds(f"ids to group must be int64 [n], got {array_kind(ids)}")
    if len(ids) > _ROWS_LIMIT:
        raise BadIds(f"{len(ids)} ids in one batch: at most {_ROWS_LIMIT} can be grouped")


def _bits_of_cells(ids: int) -> int:
    """The logarithm of how many cells so many ids are searched in.

    At most a quarter of them are taken, or half where a quarter would not stay in the processor's second cache: of
    half-full cells every other search meets a taken one, which the processor does not foresee (measured: 65,536
    different ids take twice the time).
    """
    quarter, half = (4 * ids - 1).bit_length(), (2 * ids - 1).bit_length()
    return max(_FEWEST_BITS, half, min(quarter, _CACHED_BITS))


def unique_ids(ids: Int64) -> tuple[Int64, Int32]:
    """The id set of a batch, in new memory; else as `Indexer.unique`."""
    unique, inverse = Indexer().unique(ids)
    return unique.copy(), inverse


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


GradientPart = tuple[Int64, Float32, float]
"""ids int64 `[n]`, gradients float32 `[n, dim]`, and the scale that multiplies them."""

_IDS_SHARED = 1 << 14  # fewer are summed before another thread has begun
_STEP = 1 << 12
_VALUES_A_THREAD = 1 << 22  # of sums; fewer are added faster than threads share them (measured: 65,536 x 64)
_SUMS_A_THREAD = 1 << 17  # of sums by position: some 100 us


def coalesce(ids: Int64, gradients: Float32, pool: RangePool = SERIAL) -> TableUpdate:
    """Sums the gradients of each id.

    Args:
        ids: int64 `[n]`, duplicates allowed.
        gradients: float32 `[n, dim]`.
        pool: Threads to sum with.

    Raises:
        BadGradient: not one gradient row for each id.
    """
    return coalesce_many([(ids, gradients, 1.0)], pool)


def coalesce_many(parts: Sequence[GradientPart], pool: RangePool = SERIAL) -> TableUpdate:
    """Sums several pushes of one table, in the order given.

    Each gradient is multiplied by its push's scale, rounded to float32, and
    then added: the result is the left fold over all occurrences of an id.

    Args:
        parts: At least one (ids int64 `[n]`, gradients float32 `[n, dim]`, scale); the same dim in all.
        pool: Threads to sum with.

    Returns:
        The sums; where there is nothing to sum, the ids and gradients handed in.

    Raises:
        BadGradient: no parts, not one gradient row for each id, or pushes of different dims.
    """
    return Coalescer().coalesce_many(parts, pool)


class Coalescer:
    """Sums one batch of gradients after the other in the same memory.

    One thread at a time may use a coalescer; each call lets go of what the call before returned.
    """

    def __init__(self) -> None:
        self._indexer = Indexer()
        self._sums = Scratch(np.float32)

    def coalesce_many(self, parts: Sequence[GradientPart], pool: RangePool = SERIAL) -> TableUpdate:
        """As `coalesce_many`, in memory that the next call overwrites."""
        dim = _common_dim(parts)
        ids = np.concatenate([part[0] for part in parts]) if len(parts) > 1 else parts[0][0]
        as_it_is = len(parts) == 1 and parts[0][2] == 1.0
        if as_it_is and self._indexer.all_different(ids):
            # Every id once, as workers send them: there is nothing to sum.
            return TableUpdate(np.ascontiguousarray(ids), np.ascontiguousarray(parts[0][1]))
        if len(parts) == 1 and pool.threads > 1 and len(ids) >= _IDS_SHARED:
            steps = self._indexer.unique_by_steps(ids, _STEP)
            first = next(steps)
            if len(first[0]) < len(first[1]):
                gradients, scale = parts[0][1], np.float32(parts[0][2])
                return self._sum_behind(chain((first,), steps), np.ascontiguousarray(gradients), scale, pool)
            *_, (unique, inverse) = chain((first,), steps)  # there may be nothing to sum
        else:
            unique, inverse = self._indexer.unique(ids)
        if as_it_is and len(unique) == len(inverse):
            return TableUpdate(unique, np.ascontiguousarray(parts[0][1]))
        ends = np.cumsum([len(ids) for ids, _, _ in parts])
        sums = self._sums.take(len(unique), dim)
        pieces = [
            (inverse[end - len(ids) : end], np.ascontiguousarray(gradients), np.float32(scale))
            for (ids, gradients, scale), end in zip(parts, ends, strict=True)
        ]

        def add(start: int, stop: int) -> None:
            seen = start
            for piece in pieces:
                seen = _add_scaled(sums, start, stop, seen, *piece)

        pool.run(add, len(unique), max(1, _VALUES_A_THREAD // dim))
        return TableUpdate(unique, sums)

    def _sum_behind(
        self, grouped: Iterator[tuple[Int64, Int32]], gradients: Float32, scale: np.float32, pool: RangePool
    ) -> TableUpdate:
        """One thread groups ids, step by step, and another one sums behind it."""
        sums = self._sums.take(*gradients.shape)
        handed: SimpleQueue[tuple[Int64, Int32] | None] = SimpleQueue()
        found = list[Int64]()

        def group() -> None:
            try:
                for step in grouped:
                    handed.put(step)
            finally:
                handed.put(None)

        def add() -> None:
            start = seen = 0
            while (step := handed.get()) is not None:
                unique, inverse = step
                seen = _add_scaled(sums, 0, len(unique), seen, inverse[start:], gradients[start:], scale)
                start = len(inverse)
                found.append(unique)

        # In this order: a thread that is alone groups first, and finds all of it handed to itself.
        pool.share(lambda start, stop: (group, add)[start](), 2, 1)
        return TableUpdate(found[-1], sums[: len(found[-1])])


def sum_by_position(ids: Int64, positions: Int32, gradients: Float32) -> tuple[Int64, Float32]:
    """Sums gradients whose grouping is known: `coalesce` without a search.

    Args:
        ids: int64 `[g]`, each id once.
        positions: int32 `[n]`, 0 <= position < g: of each gradient the place of its id.
        gradients: float32 `[n, dim]`.

    Returns:
        present: int64 `[u]`, the ids that have a gradient, in the order of `ids`.
        sums: float32 `[u, dim]`, the left fold over the occurrences of each.

    Raises:
        BadGradient: not one gradient row for each position, or a position out of range.
    """
    if gradients.ndim != 2 or gradients.dtype != np.float32 or len(gradients) != len(positions):
        raise BadGradient(
            f"gradients: want float32 [{len(positions)}, dim], one row for each position, "
            f"got {gradients.dtype} {list(gradients.shape)}"
        )
    if len(positions) and not 0 <= positions.min() <= positions.max() < len(ids):
        raise BadGradient(f"positions of gradients must lie in 0 <= position < {len(ids)}")
    total, seen = np.empty((len(ids), gradients.shape[1]), np.float32), np.zeros(len(ids), np.bool_)
    add = partial(_add_at, total, seen, positions, np.ascontiguousarray(gradients))
    shared_pool().run(add, len(ids), max(1, _SUMS_A_THREAD // max(1, gradients.shape[1])))
    return (ids, total) if seen.all() else (ids[seen], total[seen])


def _common_dim(parts: Sequence[GradientPart]) -> int:
    if not parts:
        raise BadGradient("no gradients to sum: give at least one part")
    for number, (ids, gradients, _) in enumerate(parts):
        if gradients.ndim != 2 or gradients.dtype != np.float32 or len(gradients) != len(ids):
            raise BadGradient(
                f"gradients of part {number}: want float32 [{len(ids)}, dim], one row for each id, "
                f"got {gradients.dtype} {list(gradients.shape)}"
            )
        if gradients.shape[1] != parts[0][1].shape[1]:
            raise BadGradient(
                f"gradients of part {number} have dim {gradients.shape[1]}, those of part 0 {parts[0][1].shape[1]}"
            )
    return max(1, int(parts[0][1].shape[1]))


@kernel
def _add_at(
    total: Float32, seen: npt.NDArray[np.bool_], positions: Int32, gradients: Float32, start: int, stop: int
) -> None:
    """Sums into the rows start..stop of `total`; `seen`: which of these occur."""
    dim = gradients.shape[1]
    for i in range(len(positions)):
        group = np.int64(positions[i])
        if group < start or group >= stop:
            continue
        row = total[group]
        gradient = gradients[i]
        if seen[group]:
            for j in range(dim):
                row[j] += gradient[j]
        else:
            for j in range(dim):
                row[j] = gradient[j]
            seen[group] = True


@kernel
def _add_scaled(
    sums: Float32, start: int, stop: int, seen: int, inverse: Int32, gradients: Float32, scale: np.float32
) -> int:
    """Adds the gradients of groups start..stop; groups below `seen` have a value already.

    Groups are numbered in first-seen order, so a group is met for the first time exactly when it equals `seen`.
    """
    dim = gradients.shape[1]
    for i in range(len(inverse)):
        group = np.int64(inverse[i])
        if group < start or group >= stop:
            continue
        row = sums[group]
        gradient = gradients[i]
        if group == seen:
            for j in range(dim):
                row[j] = gradient[j] * scale
            seen += 1
        else:
            for j in range(dim):
                row[j] += gradient[j] * scale
    return seen
