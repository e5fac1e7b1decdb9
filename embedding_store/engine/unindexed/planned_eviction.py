"""Which rows an eviction takes of a table that does not know all of its rows: those in memory, and cold ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.arrays import Bools, Int64
from elastable.embedding_store.contract.row_data import EvictionCut
from elastable.embedding_store.contract.spec import EvictionSpec
from elastable.embedding_store.contract.tier import END_OF_RANKS
from elastable.embedding_store.engine.membership.stored_touches import UNSETTLED
from elastable.embedding_store.engine.unindexed.near_records import NEAR
from elastable.embedding_store.engine.unindexed.ranked_rows import RankedRows
from elastable.embedding_store.engine.unindexed.tier_directory import TierDirectory
from elastable.embedding_store.engine.unindexed.unindexed_membership import UnindexedMembership

__all__ = ["PlannedEviction", "TouchedRows"]

_EVER = 1 << 62  # above every version
_SCANNED = 1 << 13  # rows that are read at a time
_NONE: Int64 = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class TouchedRows:
    """Rows as they are touched once a commit is made.

    Attributes:
        ids: int64 `[n]`.
        versions: int64 `[n]`, that last touched them.
        times: int64 `[n]`, how often since the last look.
    """

    ids: Int64
    versions: Int64
    times: Int64

    def where(self, chosen: Bools) -> TouchedRows:
        """Those of them that `chosen` bool `[n]` says."""
        return TouchedRows(self.ids[chosen], self.versions[chosen], self.times[chosen])


class PlannedEviction:
    """What goes of a table at a version, as `RowTouches.evict` would say; changes nothing.

    Memory is needed for the rows that go, and 8 bytes for each row in memory where `max_rows` says what goes.

    Args:
        rule: Of the table.
        directory, members: Of the table.
        version: That is to be committed, and looks at rows.
        touched: int64, ids that its update touches; for `goes` their rows, where they have one, are in memory.
        ranked: Cold rows by rank; None: there are no cold rows.
    """

    def __init__(
        self,
        rule: EvictionSpec,
        directory: TierDirectory,
        members: UnindexedMembership,
        version: int,
        touched: Int64,
        ranked: Callable[[], RankedRows | None],
    ) -> None:
        self._rule, self._directory, self._members = rule, directory, members
        self._version, self._ranked = version, ranked
        self._touched, self._again = touched, np.empty(len(touched), np.int64)
        self._fresh = directory.find_here(touched, self._again)

    def goes(self, time: float, cut: EvictionCut | None) -> Int64:
        """int64: ids of the rows that go; `time`: when the version is committed, `cut`: as of `Commit`.

        Raises:
            ElastableError: as `Tier.read` and `IndexedTier.lowest`.
        """
        oldest, least_times = self._members.too_old(self._version, time), self._rule.min_frequency or 0
        now = self._touched_now()
        stays = self._stays(now, oldest)
        gone = np.concatenate((now.ids[~stays], self._untouched(oldest - 1, least_times).ids))
        if least_times:
            gone = np.concatenate([gone, *(rows.ids[~self._stays(rows, oldest)] for rows in self._cold())])
        elif oldest > 0 and (ranked := self._ranked()) is not None:
            gone = np.concatenate((gone, ranked.before(oldest)[0]))
        if cut is not None:
            least_id = self._members.own_id(cut.least_id)
            return np.concatenate((gone, self._cut_off(now.where(stays), gone, cut.version, least_id)))
        if self._rule.max_rows is not None:
            excess = self._directory.count + self._fresh - len(gone) - self._rule.max_rows
            return np.concatenate((gone, self._oldest(now.where(stays), gone, excess)))
        return gone

    def stays(self, time: float, ranked: RankedRows | None) -> tuple[Int64, Int64]:
        """All rows but those that go whatever their number: ids, and versions that last touched them, int64 `[n]` each.

        `ranked`: cold rows; None: there are none, or they have to be read.

        Raises:
            ElastableError: as `Tier.read` and `IndexedTier.lowest`.
        """
        oldest, again = self._members.too_old(self._version, time), _NONE
        found = [self._untouched(_EVER, 0)]
        for rows in self._cold() if ranked is None else (_never_counted(*ranked.before(END_OF_RANKS)),):
            touched = np.isin(rows.ids, self._touched)
            rows.versions[touched] = self._version
            rows.times[touched] += 1
            again = np.concatenate((again, rows.ids[touched]))
            found.append(rows)
        now = self._touched_now()
        found.append(now.where(~np.isin(now.ids, again)))  # of these, cold rows were taken for ids without a row
        left = [rows.where(self._stays(rows, oldest)) for rows in found]
        return np.concatenate([rows.ids for rows in left]), np.concatenate([rows.versions for rows in left])

    def _touched_now(self) -> TouchedRows:
        """The rows that the update touches, once it has."""
        times = np.ones(len(self._touched), np.int64)
        here = self._again >= 0
        times[here] += self._as_touched(self._touched[here], self._again[here]).times
        return TouchedRows(self._touched, np.full(len(times), self._version), times)

    def _untouched(self, last: int, least_times: int) -> TouchedRows:
        """Of the rows in memory that the update leaves alone those last touched until then, or too seldom."""
        positions = self._members.touched_until(last, least_times, self._version)
        positions = positions[~np.isin(positions, self._again)]
        return self._as_touched(self._directory.row_ids[positions], positions)

    def _as_touched(self, ids: Int64, places: Int64) -> TouchedRows:
        touches = self._members.touches(places)
        assert touches is not None
        versions, times = touches[:, 0].copy(), touches[:, 1].copy()
        versions[versions == UNSETTLED] = self._version
        return TouchedRows(ids, versions, times)

    def _stays(self, rows: TouchedRows, oldest: int) -> Bools:
        stays = rows.versions >= oldest
        if self._rule.min_frequency:
            stays &= rows.times >= self._rule.min_frequency
        return stays

    def _cold(self) -> Iterator[TouchedRows]:
        """Every row that is not in memory, some at a time."""
        cursor = 0
        while not self._directory.all_here:
            ids, places, cursor = self._directory.scan(cursor, _SCANNED)
            if not len(ids):
                return
            cold = places >= NEAR
            if cold.any():
                yield self._as_touched(ids[cold], places[cold])

    def _cut_off(self, now: TouchedRows, gone: Int64, version: int, least_id: int | None) -> Int64:
        """Of the rows that have not gone those that were touched before a version, or then with such an id.

        `now`: those among them that the update touches.
        """
        ranked, here = self._ranked(), self._untouched(version, 0)
        ids, versions = (_NONE, _NONE) if ranked is None else ranked.before(version + 1)
        ids = np.concatenate((here.ids, ids, now.ids))
        versions = np.concatenate((here.versions, versions, now.versions))
        tied = np.zeros(len(ids), np.bool_) if least_id is None else (versions == version) & (ids >= least_id)
        return ids[((versions < version) | tied) & ~np.isin(ids, gone)]

    def _oldest(self, now: TouchedRows, gone: Int64, count: int) -> Int64:
        """Of the rows that have not gone the `count` oldest, of equal ones those of greater ids; `now`: see above."""
        if count <= 0:
            return _NONE
        ranked = self._ranked()
        ids, versions = (_NONE, _NONE) if ranked is None else ranked.oldest(count, lambda some: np.isin(some, gone))
        # No row that was touched later is among the oldest. Those that have gone, or are touched now, may be older.
        last = int(versions.max()) if len(ids) == count else _EVER
        nth = self._members.nth_oldest(count + len(gone) + len(self._touched), self._version)
        here = self._untouched(last if nth is None else min(last, nth), 0)
        here = here.where(~np.isin(here.ids, gone))
        ids = np.concatenate((here.ids, ids, now.ids))
        versions = np.concatenate((here.versions, versions, now.versions))
        return ids[np.lexsort((~ids, versions))[:count]]


def _never_counted(ids: Int64, versions: Int64) -> TouchedRows:
    return TouchedRows(ids, versions, np.zeros(len(ids), np.int64))
