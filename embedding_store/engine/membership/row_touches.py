"""When and how often rows were touched, and which of them an eviction takes.

Nothing here allocates memory while it looks, so that a commit that has begun
to change rows also ends.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt32
from elastable.embedding_store.contract.row_data import NEXT_VERSION
from elastable.embedding_store.contract.spec import EvictionSpec
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.slab import SlabMaker, anonymous_slab

__all__ = ["RowTouches", "UInt32"]


_NO_ROW = -1
_NO_TIE = -2
_CHUNK = 1 << 12  # rows that go at a time
_DIGIT_BITS = 11


class RowTouches:
    """By position the version that last touched a row, and where frequency counts how often it was touched.

    Positions stand once in every call.
    """

    def __init__(self, eviction: EvictionSpec, rows: int, new_slab: SlabMaker = anonymous_slab) -> None:
        """Room for `rows` rows. Raises `MemoryError`."""
        self._eviction = eviction
        self._versions = new_slab("touched", rows, 1, np.int64)
        # Without its rule nobody asks how often.
        self._times = None if eviction.min_frequency is None else new_slab("frequency", rows, 1, np.uint32)
        self._tally = np.zeros(1 << _DIGIT_BITS, np.int64)
        self._doomed, self._doomed_ids = np.empty(_CHUNK, np.int64), np.empty(_CHUNK, np.int64)
        self._unsettled = False

    @property
    def row_bytes(self) -> int:
        """Bytes that this takes of each row."""
        return 8 if self._times is None else 12

    def grow(self, rows: int) -> None:
        """Makes room for `rows` rows. Raises `MemoryError`, and nothing has changed."""
        self._versions.grow(rows)
        if self._times is not None:
            self._times.grow(rows)

    def touch(self, positions: Int64, fresh: Int64, version: int) -> None:
        """Rows at `positions` int64 `[n]` are touched once more; those at `positions[fresh]` for the first time."""
        self._versions.array[positions, 0] = version
        if self._times is not None:
            self._times.array[positions[fresh], 0] = 0
            _once_more(self._times.array[:, 0], positions)

    def read(self, positions: Int64) -> Int64:
        """int64 `[n, 2]`: version and frequency (0 where nobody counts it)."""
        touches = np.zeros((len(positions), 2), np.int64)
        touches[:, 0] = self._versions.array[positions, 0]
        if self._times is not None:
            touches[:, 1] = self._times.array[positions, 0]
        return touches

    def write(self, positions: Int64, touches: Int64 | None) -> None:
        """What `read` gave; None: touched once, at the version that is committed next."""
        self._versions.array[positions, 0] = NEXT_VERSION if touches is None else touches[:, 0]
        if self._times is not None:
            self._times.array[positions, 0] = 1 if touches is None else touches[:, 1]
        self._unsettled |= touches is None or bool((touches[:, 0] == NEXT_VERSION).any())

    def frequencies(self, high: int) -> UInt32 | None:
        """uint32 `[high]`, a copy of how often the rows below position `high` were touched; None: nobody counts."""
        return None if self._times is None else self._times.array[:high, 0].copy()

    @property
    def unsettled(self) -> bool:
        """Whether rows may have been put without a version."""
        return self._unsettled

    def unsettled_positions(self, high: int) -> Int64:
        """int64: positions below `high` of rows that were put without a version."""
        return np.flatnonzero(self._versions.array[:high, 0] == NEXT_VERSION)

    def counts_anew(self, version: int) -> bool:
        """Whether `evict` at this version begins to count touches anew."""
        return self._times is not None and not version % self._eviction.every

    def forget(self, positions: Int64) -> None:
        """There are no rows at `positions` any more."""
        self._versions.array[positions, 0] = _NO_ROW

    def settle(self, version: int, high: int) -> None:
        """Rows below position `high` that were put without a version have this one now."""
        if self._unsettled:
            versions = self._versions.array[:high, 0]
            versions[versions == NEXT_VERSION] = version
            self._unsettled = False

    def staying(
        self, version: int, row_ids: Int64, touched: Int64, fresh_ids: Int64, oldest: int = 0
    ) -> tuple[Int64, Int64]:
        """The rows that `evict` would leave but for `max_rows`: versions that last touched them, and ids, int64 `[n]`.

        Args:
            version: That is to be committed, and looks at rows.
            row_ids: As of `evict`.
            touched: int64, positions of rows that it touches.
            fresh_ids: int64, ids that it gives a row.
            oldest: As of `evict`.
        """
        least_times = self._eviction.min_frequency or 0
        versions = self._versions.array[: len(row_ids), 0].copy()
        versions[versions == NEXT_VERSION] = version
        versions[touched] = version
        stays = versions >= max(0, self._oldest(version, oldest))
        if self._times is not None and least_times:
            times = self._times.array[: len(row_ids), 0].astype(np.int64)
            times[touched] += 1
            stays &= times >= least_times
            fresh_ids = fresh_ids[: None if least_times == 1 else 0]
        together = np.full(len(fresh_ids), version, np.int64)
        return np.concatenate([versions[stays], together]), np.concatenate([row_ids[stays], fresh_ids])

    def _oldest(self, version: int, oldest: int) -> int:
        age = self._eviction.max_age
        return oldest if age is None else max(oldest, version - age)

    def evict(
        self,
        version: int,
        row_ids: Int64,
        count: int,
        remove: Callable[[Int64], int],
        oldest: int = 0,
        cut: tuple[int, int | None] | None = None,
    ) -> int:
        """Lets go of rows as the eviction says, where it looks at this version.

        Args:
            version: That is being committed.
            row_ids: int64 `[high]`, the id at each position.
            count: Rows that there are.
            remove: Takes rows away by their ids; is called with a few at a time, whose touches stand until then.
            oldest: Rows that were last touched before this version go, whatever else the eviction says.
            cut: What goes for `max_rows`, where others decide: rows touched before a version, and of those of that
                version the ones with this id or a greater one (None: none). None: rows of this table alone count.

        Returns:
            How many rows went.
        """
        rule = self._eviction
        if version % rule.every:
            return 0
        oldest = self._oldest(version, oldest)
        gone = self._let_go(row_ids, oldest, _NO_TIE, 0, rule.min_frequency or 0, remove)
        if cut is not None:
            before, least = cut
            gone += self._let_go(row_ids, before, _NO_TIE if least is None else before, least or 0, 0, remove)
        elif rule.max_rows is not None and count - gone > rule.max_rows:
            versions = self._versions.array[: len(row_ids), 0]
            tied, of_it = _nth_oldest(versions, count - gone - rule.max_rows, self._tally)
            least_id = _nth_greatest_id(versions, row_ids, int(tied), of_it, self._tally)
            gone += self._let_go(row_ids, int(tied), int(tied), int(least_id), 0, remove)
        self.count_anew(len(row_ids))
        return gone

    def count_anew(self, high: int) -> None:
        """Forgets how often the rows below position `high` were touched."""
        if self._times is not None:
            self._times.array[:high] = 0

    def _let_go(
        self, row_ids: Int64, oldest: int, tied: int, least_id: int, least_times: int, remove: Callable[[Int64], int]
    ) -> int:
        versions = self._versions.array[: len(row_ids), 0]
        times = _NO_TIMES if self._times is None else self._times.array[: len(row_ids), 0]
        rule = (oldest, tied, least_id, least_times)
        gone = position = 0
        while position < len(row_ids):
            found, position = _doomed(versions, times, row_ids, position, rule, self._doomed)
            doomed, ids = self._doomed[:found], self._doomed_ids[:found]
            np.take(row_ids, doomed, out=ids, mode="clip")
            gone += remove(ids)
            versions[doomed] = _NO_ROW
        return gone


_NO_TIMES: UInt32 = np.empty(0, np.uint32)


@kernel
def _once_more(times: UInt32, positions: Int64) -> None:
    for position in positions:
        if times[position] < np.uint32(0xFFFFFFFF):
            times[position] += np.uint32(1)


@kernel
def _doomed(
    versions: Int64, times: UInt32, row_ids: Int64, position: int, rule: tuple[int, int, int, int], doomed: Int64
) -> tuple[int, int]:
    """Positions of rows that go, from `position` on, until `doomed` is full; their number, and the next position.

    Rows go that were last touched before version `oldest`, or at version
    `tied` with an id of `least_id` or above, or fewer than `least_times` times.
    """
    oldest, tied, least_id, least_times = rule
    count = 0
    while position < len(versions) and count < len(doomed):
        version = versions[position]
        goes = version < oldest or (version == tied and row_ids[position] >= least_id)
        if least_times > 0 and times[position] < least_times:
            goes = True
        if goes and version >= 0:
            doomed[count] = position
            count += 1
        position += 1
    return count, position


@kernel
def _nth_oldest(versions: Int64, n: int, tally: Int64) -> tuple[np.int64, int]:
    """The version of the n-th oldest row, from 1, and how many of the rows of that version are among the n oldest."""
    found = np.int64(0)
    for shift in range(55, -1, -11):
        tally[:] = 0
        for version in versions:
            if version >= 0 and (shift == 55 or (version >> (shift + 11)) == (found >> (shift + 11))):
                tally[(version >> shift) & 2047] += 1
        digit = 0
        while tally[digit] < n:
            n -= tally[digit]
            digit += 1
        found |= np.int64(digit) << shift
    return found, n


@kernel
def _nth_greatest_id(versions: Int64, row_ids: Int64, tied: int, n: int, tally: Int64) -> np.int64:
    """The n-th greatest id, from 1, of the rows last touched at version `tied`."""
    flip = np.uint64(1) << np.uint64(63)  # as unsigned numbers, negative ids would come last
    found = np.uint64(0)
    for shift in range(55, -1, -11):
        tally[:] = 0
        for i in range(len(versions)):
            if versions[i] == tied:
                key = np.uint64(row_ids[i]) ^ flip
                if shift == 55 or (key >> np.uint64(shift + 11)) == (found >> np.uint64(shift + 11)):
                    tally[np.int64((key >> np.uint64(shift)) & np.uint64(2047))] += 1
        digit = 2047
        while tally[digit] < n:
            n -= tally[digit]
            digit -= 1
        found |= np.uint64(digit) << np.uint64(shift)
    return np.int64(found ^ flip)
