"""Rows in memory of a table whose ids are found in its tier: as many as there is room for, the hot ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64, UInt8
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.frames.frame_kernels import CLEAN, HELD, HOTTEST
from elastable.embedding_store.engine.frames.record_layout import TOUCH_BYTES
from elastable.embedding_store.engine.frames.stored_table import StoredTable
from elastable.embedding_store.engine.frames.tiered_rows import TieredRows
from elastable.embedding_store.engine.membership.stored_touches import StoredTouches
from elastable.embedding_store.engine.table_rows import ResidentRows
from elastable.embedding_store.engine.unindexed.near_records import NEAR
from elastable.embedding_store.engine.unindexed.tier_directory import TierDirectory
from elastable.embedding_store.engine.unindexed.touch_kernels import collect_touched, touched_versions
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.slab import Slab, anonymous_slab
from elastable.embedding_store.optimizers.base import RowOptimizer

__all__ = ["UnindexedRows", "touches_in"]

_FREE = 254  # heat of a position that no row has
_BESIDE = 33 + 2  # bytes of a row in memory: its id in the index, whether it has changed, its heat
_PRESSED_SHARE = 4  # of the rows that there is room for


class UnindexedRows(TieredRows):
    """Rows at the positions that a `TierDirectory` gives; of places from `NEAR` on it has the records.

    With eviction a row also has its touches in memory, as records hold them: `StoredTouches` reads both.

    A row stays in memory while it has changed since it was written; the others leave when room is needed, those that
    were used least first (the CLOCK algorithm with a small count).
    """

    def __init__(
        self, spec: TableSpec, optimizer: RowOptimizer, rows: int, stored: StoredTable, directory: TierDirectory
    ) -> None:
        """Room for `rows` rows."""
        self._directory = directory
        self._most: int | None = None  # rows that there is room for; None: for all
        self._heat: UInt8 = np.full(rows, _FREE, np.uint8)
        self._held: list[Int64] = []
        self._hand = self._incoming = 0
        self.touches = Slab(rows, 0 if spec.eviction is None else 2, np.int64)
        super().__init__(spec, optimizer, rows, stored, anonymous_slab)
        directory.changed_ids = self._changed_ids

    def _changed_ids(self) -> Int64:
        """Ids of rows that the tier may not have yet, for a scan; rows may be written meanwhile."""
        changed = self._state.array[:, 0].copy()  # NumPy refuses to look for what changes under it
        return self._directory.row_ids[np.flatnonzero(changed)]

    @property
    def whole(self) -> bool:
        """Never: a row that is not in memory may be in the tier."""
        return False

    @property
    def near_rows(self) -> int:
        return self._directory.near.answers

    @property
    def pressed(self) -> bool:
        return self._most is not None and _PRESSED_SHARE * self.changed > self._most

    def grow(self, rows: int) -> None:
        if rows > len(self._heat):
            self._heat = np.concatenate((self._heat, np.full(rows - len(self._heat), _FREE, np.uint8)))
            self.touches.grow(rows)
        super().grow(rows)

    def load(self, positions: Int64, records: UInt8) -> None:
        super().load(positions, records)
        if self.touches.array.shape[1]:
            self.touches.array[positions] = touches_in(records)

    def touches_at(self, places: Int64) -> Int64:
        """int64 `[n, 2]`: touches of rows at places int64 `[n]`, as records hold them; anything at negative ones."""
        here, away = self._apart(places)
        touches: Int64 = self.touches.array[here]
        if len(away):
            touches[away] = touches_in(self._directory.records(places[away]))
        return touches

    def touched_until(self, last: int, least_times: int, touched: StoredTouches, now: int) -> Int64:
        """Positions, int64 ascending, of rows in memory that were last touched at a version or before, or too seldom.

        Args:
            last: The version.
            least_times: How often rows must have been touched since the last look at them.
            touched: How to read touches.
            now: The version of rows that were put without one.
        """
        given = (
            self.touches.array,
            self._heat,
            _FREE,
            np.array([*touched.settled, now]),
            touched.counted,
            last,
            least_times,
        )
        found = np.empty(collect_touched(*given, np.empty(0, np.int64)), np.int64)
        collect_touched(*given, found)
        return found

    def nth_oldest(self, n: int, touched: StoredTouches, now: int) -> int | None:
        """The version that last touched the n-th oldest row in memory, from 1; None: there are fewer."""
        if n > self._directory.in_memory:
            return None
        versions = np.empty(self._directory.in_memory, np.int64)
        touched_versions(self.touches.array, self._heat, _FREE, np.array([*touched.settled, now]), versions)
        return int(np.partition(versions, n - 1)[n - 1])

    def make_room(self, ids: Int64) -> None:
        """Before `ids` int64 `[n]`, of which everything is near, get rows: those in memory stay there until `release`.

        Raises:
            ElastableError: changed rows would have to be written, and cannot be.
        """
        directory = self._directory
        positions = np.empty(len(ids), np.int64)
        incoming = directory.find_here(ids, positions)
        here = positions[positions >= 0]
        self._heat[here] = HELD
        self._held.append(here)
        self._let_go_for(incoming)
        short = incoming and self._most is not None and directory.in_memory + incoming > self._most
        if short and self.changed:
            self._stored.make_clean()
            self._let_go_for(incoming)

    def bring_near(self, ids: Int64) -> None:
        """Gives rows in memory to those of `ids` int64 `[n]`, each once, whose records are near; they are held."""
        directory = self._directory
        positions, records = directory.bring(ids)
        if len(positions):
            self.load(positions, records)
            self._heat[positions] = HELD
            self._held.append(positions)

    def admit_near(self) -> None:
        near = self._directory.near
        ids = near.there()
        if len(ids):
            self._let_go_for(len(ids))
            room = len(ids) if self._most is None else max(0, self._most - self._directory.in_memory)
            ids = ids[:room]
            self._directory.reserve(len(ids))
            self.grow(self._directory.capacity)
            positions, records = self._directory.bring(ids)
            self.load(positions, records)
            self._heat[positions] = HOTTEST
        near.clear()

    def release(self) -> None:
        for positions in self._held:
            held = positions[self._heat[positions] == HELD]  # not those that were deleted since
            self._heat[held] = HOTTEST
        self._held.clear()

    def cool(self, positions: Int64) -> None:
        """Rows at positions int64 `[n]` are the first to leave, once they may: nobody has asked for them."""
        self._heat[positions] = 0

    def read(self, positions: Int64, out: Float32, stream: bool = False) -> None:
        here, away = self._apart(positions)
        _warm(self._heat, here)
        self._rows.read(here, out, stream)
        for some, scratch in self._in_scratch(positions, away):
            rows = np.empty((len(some), self._spec.dim), np.float32)
            scratch.read(np.arange(len(some)), rows)
            out[some] = rows

    def block(self, positions: Int64) -> tuple[Float32, Float32]:
        weights = np.empty((len(positions), self._spec.dim), np.float32)
        slots = np.empty((len(positions), self._optimizer.slot_width(self._spec.dim)), np.float32)
        self.copy(positions, weights, slots)
        return weights, slots

    def copy(self, positions: Int64, weights: Float32, slots: Float32, stream: bool = False) -> None:
        here, away = self._apart(positions)
        self._rows.copy(here, weights, slots, stream)
        for some, scratch in self._in_scratch(positions, away):
            weights[some], slots[some] = scratch.block(np.arange(len(some)))

    def forget(self, positions: Int64) -> None:
        here = positions[positions < NEAR]
        self._state.array[here, 0] = CLEAN
        self._heat[here] = _FREE

    def _changing(self, positions: Int64) -> Int64:
        _warm(self._heat, positions)
        return super()._changing(positions)

    def _apart(self, positions: Int64) -> tuple[Int64, Int64]:
        """Positions of rows in memory, -1 for the others; and the indices of those that have been read."""
        away = np.flatnonzero(positions >= NEAR)
        if not len(away):
            return positions, away
        here = positions.copy()
        here[away] = -1
        return here, away

    def _in_scratch(self, places: Int64, away: Int64) -> Iterator[tuple[Int64, ResidentRows]]:
        if len(away):
            records = self._directory.records(places[away])
            yield from self._cold.in_scratch(away, records, np.arange(len(away)))

    def _need(self) -> int:
        rows = max(self._positions, self._directory.count + self._incoming)
        return rows * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return super()._row_bytes + _BESIDE + (0 if self._spec.eviction is None else TOUCH_BYTES)

    def _resize(self, share: int) -> None:
        self._most = None if share >= self._need() else self._wanted(share)

    def _let_go_for(self, incoming: int) -> None:
        """Lets rows go, as far as they may, so that there is room for some more."""
        self._incoming = incoming
        self._stored.budget.declare(self, self._need(), self._resize)
        if self._most is None:
            return
        excess = self._directory.in_memory + incoming - self._most
        if excess > 0:
            gone = np.empty(min(excess, self._directory.in_memory), np.int64)
            state = self._state.array[: len(self._heat), 0]
            count, self._hand = _coldest(state, self._heat, self._hand % max(1, len(self._heat)), gone)
            self._directory.let_go(gone[:count])


def touches_in(records: UInt8) -> Int64:
    """The touches in whole records uint8 `[n, bytes]`: int64 `[n, 2]`, a copy."""
    return np.ascontiguousarray(records[:, -TOUCH_BYTES:]).view("<i8").astype(np.int64)


@kernel
def _warm(heat: UInt8, positions: Int64) -> None:
    """The rows at positions int64 `[n]` are used; negative ones are passed over."""
    for i in range(len(positions)):
        position = positions[i]
        if position >= 0:
            if heat[position] < HOTTEST:
                heat[position] += 1
            elif heat[position] == _FREE:
                heat[position] = HOTTEST


@kernel
def _coldest(state: UInt8, heat: UInt8, hand: int, taken: Int64) -> tuple[int, int]:
    """Positions of clean rows that were not used lately, from `hand` on; they are free then.

    Args:
        state, heat: uint8 `[rows]`; heat falls where the hand passes.
        hand: The position to begin with.
        taken: int64 `[n]`, gets the positions.

    Returns:
        How many there are, n at most, and the next hand.
    """
    count, rows = 0, len(heat)
    for _ in range((HOTTEST + 2) * rows):
        if count == len(taken):
            break
        position = hand
        hand = 0 if hand + 1 == rows else hand + 1
        if state[position] != CLEAN or heat[position] == HELD or heat[position] == _FREE:
            continue
        if heat[position] > 0:
            heat[position] -= 1
            continue
        heat[position] = _FREE
        taken[count] = position
        count += 1
    return count, hand
