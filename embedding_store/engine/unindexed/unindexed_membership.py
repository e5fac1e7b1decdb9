"""Admission and eviction of a table whose ids are found in its tier: touches as records hold them, nothing beside."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.frames.record_layout import TOUCH_BYTES
from elastable.embedding_store.engine.membership.row_membership import RowMembership
from elastable.embedding_store.engine.membership.stored_touches import FREQUENCY_BITS, UNSETTLED, StoredTouches
from elastable.embedding_store.engine.unindexed.unindexed_rows import UnindexedRows
from elastable.embedding_store.native.ids.row_directory import RowDirectory

__all__ = ["UnindexedMembership"]

_MOST_TIMES = (1 << FREQUENCY_BITS) - 1


class UnindexedMembership(RowMembership):
    """As `RowMembership`, of a table with eviction whose rows may be in the tier alone.

    The touches of a row are what its record says of them, in memory too. What happens to all touches at once changes
    `StoredTouches` and no row: so a row that has not changed since a version was pinned says how it was touched then.
    Which rows go is planned before (`plan_eviction`).
    """

    def __init__(self, spec: TableSpec, rows: UnindexedRows, touched: Callable[[], StoredTouches]) -> None:
        """`touched`: how to read the touches of all rows, now; `settle` changes it."""
        super().__init__(spec, 0, keeps_touches=False)
        assert spec.eviction is not None
        self._rule, self._rows, self._touched = spec.eviction, rows, touched

    @property
    def row_bytes(self) -> int:
        return TOUCH_BYTES

    def touch(self, positions: Int64, fresh: Int64, version: int) -> None:
        kept = np.full((len(positions), 2), version, np.int64)
        kept[:, 1] = 0
        if self._rule.min_frequency is not None:
            times = self._touched().seen(self._rows.touches_at(positions))[:, 1]
            times[fresh] = 0
            kept[:, 1] = self._counted(np.minimum(times + 1, _MOST_TIMES))
        self._rows.touches.array[positions] = kept

    def touches(self, positions: Int64) -> Int64 | None:
        return self._touched().seen(self._rows.touches_at(positions))

    def kept_touches(self, positions: Int64) -> Int64 | None:
        return self._rows.touches_at(positions)

    def seen_touches(self, kept: Int64, touched: StoredTouches | None) -> Int64:
        return (self._touched() if touched is None else touched).seen(kept)

    def touch_bytes(self, positions: Int64, touched: StoredTouches) -> UInt8 | None:
        return self._rows.touches_at(positions).astype("<i8", copy=False).view(np.uint8)

    def put(self, positions: Int64, touches: Int64 | None) -> None:
        kept = np.empty((len(positions), 2), np.int64)
        kept[:] = (UNSETTLED, 1) if touches is None else touches
        if self._rule.min_frequency is None:
            kept[:, 1] = 0
        kept[:, 1] = self._counted(kept[:, 1])
        waiting = kept[:, 0] == UNSETTLED
        kept[waiting, 0] += len(self._touched().settled)
        self._touched().unsettled |= bool(waiting.any())
        self._rows.touches.array[positions] = kept

    def _counted(self, times: Int64) -> Int64:
        """How often rows were touched, int64 `[n]`, since the present count began."""
        return times | (self._touched().counted << FREQUENCY_BITS)

    def settle(self, version: int, directory: RowDirectory) -> None:
        self._touched().unsettled = False

    def forget(self, ids: Int64, directory: RowDirectory) -> None:
        """Rows that are gone have no touches."""

    def end_eviction(self, version: int, directory: RowDirectory, time: float | None = None) -> None:
        self.settle(version, directory)
        self._note_time(version, time)

    def counts_anew(self, version: int) -> bool:
        return self._rule.min_frequency is not None and not version % self._rule.every

    @property
    def has_unsettled(self) -> bool:
        return self._touched().unsettled

    def too_old(self, version: int, time: float) -> int:
        """Rows that were last touched before this version go, where one is committed at a time."""
        oldest = 0 if self._times is None else self._times.oldest_at(version, time)
        age = self._rule.max_age
        return oldest if age is None else max(oldest, version - age)

    def touched_until(self, last: int, least_times: int, now: int) -> Int64:
        """As `UnindexedRows.touched_until`."""
        return self._rows.touched_until(last, least_times, self._touched(), now)

    def nth_oldest(self, n: int, now: int) -> int | None:
        """As `UnindexedRows.nth_oldest`."""
        return self._rows.nth_oldest(n, self._touched(), now)

    def own_id(self, whole: int | None) -> int | None:
        """The least id here that is at least this id of the whole table."""
        return self._own_id(whole)

    def whole_ids(self, ids: Int64) -> Int64:
        """Ids of the whole table, int64 `[n]`."""
        return ids * self._origin.id_stride + self._origin.id_offset
