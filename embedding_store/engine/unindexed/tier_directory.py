"""A directory of rows that knows the ids in memory, and asks the tier about all others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import numpy as np

from elastable.embedding_store.contract.arrays import Bools, Int64, UInt8
from elastable.embedding_store.contract.tier import END_OF_IDS, IndexedTier, Records
from elastable.embedding_store.engine.frames.stored_table import StoredTable
from elastable.embedding_store.engine.unindexed.near_records import ABSENT, NEAR, UNKNOWN, NearRecords
from elastable.embedding_store.native.ids.id_index import IdIndex
from elastable.embedding_store.native.ids.row_directory import RowDirectory
from elastable.embedding_store.native.slab import Slab

__all__ = ["TierDirectory"]

_READ_NOW = 1 << 39  # the first place of a record that the calling thread has just read
_LISTED = 2  # stretches that are kept: of a checkpoint, say, and of dense replay, which takes its time
_NONE: Int64 = np.empty(0, np.int64)


class _ReadNow(threading.local):
    """What the last `find` of a thread has read; its places are good until the next one."""

    records: UInt8 = np.empty((0, 0), np.uint8)


class TierDirectory(RowDirectory):
    """Where the rows of a table lie: at a position in memory, or, as a place from `NEAR` on, in what was read of them.

    Of each id the first of these answers: the rows in memory; the ids that were deleted and that the tier may still
    have; what was read before; the tier. `claim` knows the rows in memory alone: whoever claims ids has had all rows
    that exist brought into memory.
    """

    _listed: Mapping[int, tuple[int, Int64, Int64]]
    """The last stretches by their ends: start, ids and their order. Replaced as a whole: many threads may scan."""

    def __init__(self, tier: IndexedTier, behind: StoredTable, record_bytes: Callable[[], int]) -> None:
        """No rows, in memory or in the tier.

        Args:
            tier: The tier.
            behind: The table there.
            record_bytes: Of its records.
        """
        self._tier, self._behind, self._record_bytes = tier, behind, record_bytes
        self.near = NearRecords()
        self.changed_ids: Callable[[], Int64] = lambda: _NONE
        self._now = _ReadNow()
        self.clear()

    @property
    def count(self) -> int:  # type: ignore[override]
        """Ids that have a row, wherever it is."""
        return self._count

    @property
    def in_memory(self) -> int:
        """Rows in memory."""
        return self._here.count

    @property
    def capacity(self) -> int:
        return self._here.capacity

    @property
    def positions_given(self) -> int:
        return self._here.positions_given

    @property
    def row_ids(self) -> Int64:
        """As `IdIndex.row_ids`."""
        return self._here.row_ids

    @property
    def bytes(self) -> int:
        return self._here.bytes + self._deleted.bytes + self.near.bytes

    def start(self, count: int) -> None:
        """The tier has so many rows, and none is in memory."""
        self._count = count

    def find(self, ids: Int64, positions: Int64) -> int:
        """As in `RowDirectory`; places from `NEAR` on are good until this thread's next `find`.

        Raises:
            StoreBroken, StoreFailed, Unavailable, DeadlineExceeded: as `Tier.read`.
        """
        missing = self._here.find(ids, positions)
        if not missing or self.all_here:
            return missing
        cold = np.flatnonzero(positions < 0)
        once, inverse = np.unique(ids[cold], return_inverse=True)
        places = self._known(once)
        unknown = np.flatnonzero(places == UNKNOWN)
        if len(unknown):
            asked = self._behind.wanted_ids(once[unknown], self._record_bytes())
            absent = self._behind.ask(asked)
            self._now.records = asked.rows
            places[unknown] = _READ_NOW + np.arange(len(unknown))
            places[unknown[absent]] = ABSENT
        positions[cold] = places[inverse.reshape(-1)]
        return int(np.count_nonzero(positions < 0))

    def find_here(self, ids: Int64, positions: Int64) -> int:
        """As `find`, of rows in memory alone."""
        return self._here.find(ids, positions)

    def unknown(self, ids: Int64) -> Records | None:
        """What to ask the tier for, so that `near` knows of all `ids` int64 `[n]` not in memory; None: nothing."""
        if self.all_here:
            return None
        positions = np.empty(len(ids), np.int64)
        if not self._here.find(ids, positions):
            return None
        once = np.unique(ids[positions < 0])
        once = once[self._known(once) == UNKNOWN]
        return self._behind.wanted_ids(once, self._record_bytes()) if len(once) else None

    def records(self, places: Int64) -> UInt8:
        """Records at places int64 `[n]`, at least one, from `NEAR` on: uint8 `[n, bytes]`."""
        now = places >= _READ_NOW
        if now.all():
            return self._now.records[places - _READ_NOW]
        if not now.any():
            return self.near.records(places)
        records = np.empty((len(places), self._record_bytes()), np.uint8)
        records[now] = self._now.records[places[now] - _READ_NOW]
        records[~now] = self.near.records(places[~now])
        return records

    def slabs(self) -> tuple[Slab, ...]:
        """None: another process cannot ask the tier here."""
        return ()

    def reserve(self, more: int) -> None:
        self._here.reserve(more)

    def places(self, ids: Int64) -> Int64:
        return self._here.places(ids)

    def claim(self, ids: Int64, positions: Int64) -> Int64:
        fresh = self._here.claim(ids, positions)
        self._count += len(fresh)
        if len(fresh) and self.near.answers:
            self.near.discard(ids[fresh])
        return fresh

    def bring(self, ids: Int64) -> tuple[Int64, UInt8]:
        """Gives rows to those of `ids` int64 `[n]`, each once and not in memory, of which a record is near.

        Returns:
            Their positions, and the records.
        """
        places = self._known(ids)
        ids, places = ids[places >= NEAR], places[places >= NEAR]
        positions = np.empty(len(ids), np.int64)
        if not len(ids):
            return positions, np.empty((0, self._record_bytes()), np.uint8)
        self._here.claim(ids, positions)
        records = self.near.records(places)
        self.near.discard(ids)
        return positions, records

    def keep(self, ids: Int64, places: Int64) -> None:
        """What this thread has just read of `ids` int64 `[n]`, each once, at `places`, is near from now on."""
        now = places >= _READ_NOW
        if now.any():
            self.near.add(ids[now], self._now.records[places[now] - _READ_NOW], _NONE)

    def let_go(self, positions: Int64) -> None:
        """Rows at positions int64 `[n]` are not in memory any more; the tier has them as they are."""
        self._here.remove(self.row_ids[positions])

    def remove(self, ids: Int64) -> int:
        once = np.unique(ids)
        positions = np.empty(len(once), np.int64)
        self.find(once, positions)
        gone = once[positions >= 0]
        self.remove_all(gone)
        return len(gone)

    def remove_all(self, ids: Int64) -> None:
        """Takes the rows of `ids` int64 `[n]` away, each once, all of which have one; nobody is asked."""
        self._here.remove(ids)
        self.near.discard(ids)
        self._deleted.reserve(len(ids))
        self._deleted.claim(ids, np.empty(len(ids), np.int64))
        self._count -= len(ids)

    def cold(self, ids: Int64) -> Bools:
        """bool `[n]`: which of `ids` int64 `[n]`, of which the tier has records, have rows that are not in memory."""
        found = np.empty(len(ids), np.int64)
        self._here.find(ids, found)
        cold = found < 0
        if self._deleted.count:
            self._deleted.find(ids, found)
            cold &= found < 0
        return cold

    def deleted_are(self, ids: Int64) -> None:
        """`ids` int64 `[n]` are those that were deleted and that the tier may still have."""
        deleted = IdIndex()
        deleted.reserve(len(ids))
        deleted.claim(ids, np.empty(len(ids), np.int64))
        self._deleted = deleted  # at once: others may be reading the last one

    def scan(self, cursor: int, limit: int) -> tuple[Int64, Int64, int]:
        """In the tier's order; the cursor is where in it the next id may be.

        Rows that are claimed while the scan goes on are seen or not, all others once.
        """
        while cursor < END_OF_IDS:
            ids, order, end = self._stretch(cursor)
            cursor = end
            if len(ids) > limit:
                cursor = int(order[limit - 1]) + 1
                ids = ids[: np.searchsorted(order, cursor)]
            positions = np.empty(len(ids), np.int64)
            self.find(ids, positions)
            live = positions >= 0
            if live.any():
                return ids[live], positions[live], cursor
        self._listed = {}
        return _NONE, _NONE, cursor

    def scanned_by(self, part: int, parts: int) -> int:
        return min(END_OF_IDS // parts * part, END_OF_IDS)

    def clear(self) -> None:
        self._here, self._deleted = IdIndex(), IdIndex()
        self.near.clear()
        self._count = 0
        self._listed = {}

    @property
    def all_here(self) -> bool:
        """Whether every row is in memory."""
        return self._here.count == self._count or not self._behind.there

    def _known(self, ids: Int64) -> Int64:
        """What is known without the tier of `ids` int64 `[n]` that are not in memory: as `NearRecords.find`."""
        places = self.near.find(ids)
        if self._deleted.count:
            found = np.empty(len(ids), np.int64)
            self._deleted.find(ids, found)
            places[found >= 0] = ABSENT
        return places

    def _stretch(self, start: int) -> tuple[Int64, Int64, int]:
        """Ids that may have rows from `start` of the tier's order to an end, in that order; and the end."""
        for end, (begin, ids, order) in self._listed.items():
            if begin < start < end:
                # The last listing of all scans: whatever row another scan needs is in it, or has an image.
                at = int(np.searchsorted(order, start))
                return ids[at:], order[at:], end
        changed = self.changed_ids()  # before the others: they may be written meanwhile
        ids, end = self._tier.listed(self._behind.name, start) if self._behind.there else (_NONE, END_OF_IDS)
        changed = changed[self._tier.order(changed) < end]
        ids = np.union1d(ids, changed)
        order = self._tier.order(ids)
        ids, order = ids[order >= start], order[order >= start]
        by_order = np.argsort(order, kind="stable")
        ids, order = ids[by_order], order[by_order]
        others = [(other, listing) for other, listing in self._listed.items() if other != end]
        self._listed = dict([*others, (end, (start, ids, order))][-_LISTED:])
        return ids, order, end
