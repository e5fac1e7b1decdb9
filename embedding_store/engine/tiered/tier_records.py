"""Rows as records of a tier: weights first, then slots, then when the row was touched."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.contract.row_data import NEXT_VERSION
from elastable.embedding_store.contract.tier import MappedRecords, Records, Tier
from elastable.embedding_store.engine.membership import RowMembership
from elastable.embedding_store.errors import StoreBroken
from elastable.embedding_store.measures import Total
from elastable.embedding_store.native.intrinsics import copy_bytes
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.slab import Slab
from elastable.embedding_store.support.memory_budget import RowBudget

TOUCH_BYTES = 16
"""int64 `[2]`, `RowBlock.touches`, little-endian, at the end of a record of a table with eviction."""


class RecordLayout:
    """Where in a record the parts of a row are.

    Attributes:
        parts: Name -> bytes, in the order in which a record holds them.
        record_bytes: Of a whole record.
        slots_at: Bytes before the slots: those of the weights.
    """

    def __init__(self, slabs: Mapping[str, Slab], with_touches: bool) -> None:
        """`slabs`: part of a row -> the slab that holds it, a row a frame. Slots, if any, come after the weights."""
        sizes = {part: slab.array.shape[1] * slab.array.itemsize for part, slab in slabs.items()}
        self.parts = {part: size for part, size in sizes.items() if size}
        row_bytes = sum(self.parts.values())
        self.slots_at = row_bytes - self.parts.get("slots", 0)
        self._touches_at = row_bytes if with_touches else None
        self.record_bytes = row_bytes + (TOUCH_BYTES if with_touches else 0)

    def pack(self, slabs: Mapping[str, Slab], frames: Int64, touches: Int64 | None, records: UInt8) -> None:
        """Copies rows into records.

        Args:
            slabs: Of the parts.
            frames: int64 `[n]`, where in them the rows are.
            touches: int64 `[n, 2]`, of a table with eviction.
            records: uint8 `[n, record_bytes]`.
        """
        at = 0
        for part, size in self.parts.items():
            _pack(_as_bytes(slabs[part]), size, frames, records.reshape(-1), records.shape[1], at)
            at += size
        if self._touches_at is not None and touches is not None:
            records[:, self._touches_at :] = touches.astype("<i8", copy=False).view(np.uint8)

    def unpack(self, records: UInt8, indices: Int64, slabs: Mapping[str, Slab], frames: Int64) -> None:
        """Copies records into rows, as many parts as there are in them.

        Args:
            records: uint8 `[m, bytes]`, whole or only their first bytes.
            indices: int64 `[n]`, which of them.
            slabs: Of the parts.
            frames: int64 `[n]`: record `indices[i]` becomes row `frames[i]`.
        """
        at = 0
        for part, size in self.parts.items():
            if at + size > records.shape[1]:
                return
            _unpack(records.reshape(-1), records.shape[1], at, indices, _as_bytes(slabs[part]), size, frames)
            at += size

    def described(self) -> Sequence[tuple[str, int]]:
        """The parts and their bytes, in order, for a tier's description."""
        touches = [] if self._touches_at is None else [("touches", TOUCH_BYTES)]
        return [*self.parts.items(), *touches]


def _as_bytes(slab: Slab) -> UInt8:
    array: UInt8 = slab.array.view(np.uint8).reshape(-1)
    return array


@kernel
def _pack(rows: UInt8, size: int, frames: Int64, records: UInt8, stride: int, at: int) -> None:
    for i in range(len(frames)):
        copy_bytes(records, i * stride + at, rows, frames[i] * size, size)


@kernel
def _unpack(records: UInt8, stride: int, at: int, indices: Int64, rows: UInt8, size: int, frames: Int64) -> None:
    for i in range(len(frames)):
        copy_bytes(rows, frames[i] * size, records, indices[i] * stride + at, size)


@dataclass(eq=False, slots=True)
class TierRecords:
    """What the rows of a table know of the tier behind them. A table that is cleared gets another one.

    Attributes:
        tier: The tier.
        name: Of the table in the tier.
        title: Of the table, for messages.
        budget: Shares memory out among tables.
        row_ids: The ids whose rows lie at positions 0, 1, ...: int64 `[rows]`; empty: an id is its position.
        make_clean: Writes every changed row of the store to the tier now; the caller has the store alone.
        there: Whether the tier has such a table.
        reads: Records that the tier was asked for, as somebody wanted these rows and they were not in memory.
    """

    tier: Tier
    name: str
    title: str
    budget: RowBudget
    row_ids: Callable[[], Int64]
    make_clean: Callable[[], None]
    there: bool = False
    reads: Total = field(default_factory=Total)

    def ids_at(self, positions: Int64) -> Int64:
        """The ids whose rows lie at positions int64 `[n]`."""
        ids = self.row_ids()
        return ids[positions] if len(ids) else positions

    def wanted(self, positions: Int64, record_bytes: int) -> Records:
        """What to ask the tier for: records of the rows at positions int64 `[n]`, each once."""
        self.reads.add(len(positions))
        return self._asking(positions, record_bytes)

    def _asking(self, positions: Int64, record_bytes: int) -> Records:
        return Records(self.name, self.ids_at(positions), positions, np.empty((len(positions), record_bytes), np.uint8))

    def read(self, positions: Int64, record_bytes: int) -> UInt8:
        """The first bytes of the records at positions int64 `[n]`, each once: uint8 `[n, record_bytes]`.

        Raises:
            StoreBroken: the tier has lost one of them.
            StoreFailed, Unavailable, DeadlineExceeded: as `Tier.read`.
        """
        wanted = self.wanted(positions, record_bytes)
        (missing,) = self.tier.read([wanted])
        self.require_all(wanted, missing)
        return wanted.rows

    def read_some(self, positions: Int64, record_bytes: int) -> tuple[UInt8, Int64]:
        """As `read`, of rows that nobody wants now; some of the positions may have no record.

        Returns:
            Records, and the indices of those that there are, int64 ascending.
        """
        wanted = self._asking(positions, record_bytes)
        (missing,) = self.tier.read([wanted])
        there = np.ones(len(positions), np.bool_)
        there[missing] = False
        return wanted.rows, np.flatnonzero(there)

    def mapped(self) -> MappedRecords | None:
        """As `Tier.mapped`, of this table; None where the tier has no such table yet, too."""
        return self.tier.mapped(self.name) if self.there else None

    def require_all(self, wanted: Records, missing: Int64) -> None:
        """Raises `StoreBroken` where the tier has no record of a row that was written to it."""
        if len(missing):
            raise StoreBroken(
                f"{self.tier.place} has lost {len(missing)} of {len(wanted.ids)} rows of table {self.title!r} that "
                f"were asked for, among them id {wanted.ids[missing[0]]}: restore a checkpoint"
            )


FREQUENCY_BITS = 32
"""Of a count in a record; above them is how many times the count had begun anew."""

UNSETTLED = NEXT_VERSION
"""From here on: put without a version; the rest counts how often such rows got theirs before."""


@dataclass(slots=True)
class StoredTouches:
    """What has happened to all touches of a table at once, which no record was rewritten for.

    Attributes:
        settled: The versions that rows that were put without one got, in the order in which that happened.
        counted: How many times eviction has begun to count anew how often rows are touched.
        unsettled: Whether rows may have been put without a version since the last of these.
    """

    settled: list[int] = field(default_factory=list)
    counted: int = 0
    unsettled: bool = False

    def copy(self, unsettled: bool | None = None) -> "StoredTouches":
        """The same, now; `unsettled`: where the table itself knows."""
        return StoredTouches(list(self.settled), self.counted, self.unsettled if unsettled is None else unsettled)

    def note(self, version: int, members: RowMembership) -> None:
        """An eviction is about to look at rows at a version."""
        if members.has_unsettled:
            self.settled.append(version)
        self.counted += members.counts_anew(version)

    def encode(self, touches: Int64) -> UInt8:
        """`RowBlock.touches` int64 `[n, 2]`, which is changed, as uint8 `[n, 16]`."""
        touches[touches[:, 0] == UNSETTLED, 0] += len(self.settled)
        touches[:, 1] |= self.counted << FREQUENCY_BITS
        return touches.astype("<i8", copy=False).view(np.uint8)

    def decode(self, stored: UInt8) -> Int64:
        """What `encode` made, now or before, as it is now: int64 `[n, 2]`."""
        touches: Int64 = stored.copy().view("<i8").astype(np.int64, copy=False)
        waiting = np.flatnonzero(touches[:, 0] >= UNSETTLED)
        if len(waiting):
            versions = np.array([*self.settled, UNSETTLED], np.int64)
            touches[waiting, 0] = versions[np.minimum(touches[waiting, 0] - UNSETTLED, len(self.settled))]
        touches[touches[:, 1] >> FREQUENCY_BITS < self.counted, 1] = 0
        touches[:, 1] &= (1 << FREQUENCY_BITS) - 1
        return touches


def filled_positions(ids: Int64, positions: Int64) -> tuple[Int64, Int64]:
    """Ids by position, without gaps: positions of deleted rows get ids that no row has.

    Returns:
        everywhere: int64 `[highest position + 1]`.
        gaps: int64, those of them that are no one's.
    """
    size = int(positions.max(initial=-1)) + 1
    free = np.ones(size, np.bool_)
    free[positions] = False
    # Among twice as many numbers as there are ids at least half are no one's.
    unused = np.setdiff1d(np.arange(len(ids) + np.count_nonzero(free)), ids)[: np.count_nonzero(free)]
    everywhere = np.empty(size, np.int64)
    everywhere[positions] = ids
    everywhere[free] = unused
    return everywhere, unused


# What lookups have read of rows that are not in memory


_MOST = 1 << 20  # positions that are kept; what is read beyond them is not counted


class RepeatedReads:
    """Positions that were read without a frame. Readers add to them; `again` has them alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: list[Int64] = []
        self.count = 0

    def add(self, positions: Int64) -> None:
        """Counts reads of positions int64 `[n]`, which are kept."""
        with self._lock:
            if len(positions) and self.count < _MOST:
                self._read.append(positions)
                self.count += len(positions)

    def again(self) -> Int64:
        """Positions that were read more than once, each once, ascending; counting begins anew.

        So a pass over all rows gives frames to none of them.
        """
        with self._lock:
            read, self._read = self._read, []
            self.count = 0
        if not read:
            return np.empty(0, np.int64)
        positions = np.sort(np.concatenate(read))
        repeated: Int64 = np.unique(positions[1:][positions[1:] == positions[:-1]])
        return repeated


class PrefetchedRecords:
    """Records by position. Readers add to them and read them; `drain` has them alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: list[tuple[Int64, UInt8]] = []
        self.rows = 0
        self.bytes = 0

    def add(self, positions: Int64, records: UInt8) -> None:
        """Keeps records uint8 `[n, bytes]` of positions int64 `[n]`, ascending and each once."""
        with self._lock:
            self._read.append((positions, records))
            self.rows += len(positions)
            self.bytes += records.nbytes

    def find(self, positions: Int64) -> list[tuple[Int64, UInt8, Int64]]:
        """Where the records of positions int64 `[n]` are.

        Returns:
            Indices in `positions`, records, and which of the records is each one's; and so on. No index is there
            twice; those that are nowhere have no record here.
        """
        found: list[tuple[Int64, UInt8, Int64]] = []
        left = np.arange(len(positions))
        for keys, records in reversed(self._read):
            if not len(left):
                break
            places = np.minimum(np.searchsorted(keys, positions[left]), len(keys) - 1)
            there = keys[places] == positions[left]
            if there.any():
                found.append((left[there], records, places[there]))
                left = left[~there]
        return found

    def drain(self) -> list[tuple[Int64, UInt8]]:
        """Everything that was added, the last first; nothing is kept."""
        with self._lock:
            read, self._read = self._read, []
            self.rows = self.bytes = 0
        return read[::-1]
