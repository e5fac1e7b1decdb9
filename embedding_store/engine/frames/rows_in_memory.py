"""How much of a table is in memory: all of it while there is room, else as many rows as its share allows."""

from __future__ import annotations

import time

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.frames.cold_rows import ColdRows
from elastable.embedding_store.engine.frames.frame_kernels import CLEAN
from elastable.embedding_store.engine.frames.missed_rows import MissedRows
from elastable.embedding_store.engine.frames.near_rows import NearRows
from elastable.embedding_store.engine.frames.record_layout import RecordLayout, RowParts
from elastable.embedding_store.engine.frames.row_frames import RowFrames
from elastable.embedding_store.engine.frames.stored_table import StoredTable
from elastable.embedding_store.engine.table_rows import ResidentRows, TableRows
from elastable.embedding_store.native.slab import Slab, SlabMaker, anonymous_slab
from elastable.embedding_store.optimizers.base import RowOptimizer

__all__ = ["RowsInMemory"]

_LEAST_FRAMES = 64
_PRESSED_SHARE = 4  # one frame in so many
_FEWEST_MISSED, _MOST_MISSED = 1 << 12, 1 << 18  # reads of rows without frames, until rows that came again get some
_SHRINK_BELOW = 0.75  # of the frames that there are
_SWOLLEN_S = 10.0  # for which frames that one change took beyond the share are kept: the next one may need as many


class RowsInMemory(TableRows):
    """Memory for the rows of a table with a tier, and what of each row is not in the tier yet."""

    def __init__(
        self, spec: TableSpec, optimizer: RowOptimizer, rows: int, stored: StoredTable, new_slab: SlabMaker
    ) -> None:
        """Room for `rows` rows, none of which is in the tier; `optimizer` is the one whose slots are kept."""
        self._spec, self._optimizer, self._stored = spec, optimizer, stored
        self._new_slab = new_slab
        self._positions = rows
        self._frames: RowFrames | None = None
        self._near = NearRows()
        self._missed = MissedRows()
        self._untouched = True
        self._share = 0
        self._swollen_at: float | None = None  # when a change last needed more frames than the share has
        self._brought: tuple[Int64, Int64] | None = None  # positions and frames of the rows that are changed next
        self._hold(rows, new_slab)
        self.layout = RecordLayout(self._parts, spec.eviction is not None)
        self._cold = ColdRows(spec, optimizer, stored, self.layout, self._near)
        self._state = Slab(max(1, rows), 1, np.uint8)
        stored.budget.declare(self, self._need(), self._resize)

    @property
    def whole(self) -> bool:
        """Whether every row is in memory, at its position."""
        return self._frames is None

    @property
    def framed(self) -> bool:
        """Whether hot rows lie in frames as float32, as `TieredRows.read_together` needs them."""
        return self._frames is not None and self._rows.plain is not None

    @property
    def near(self) -> NearRows:
        """Records that lookups have read."""
        return self._near

    @property
    def near_rows(self) -> int:
        """Records that lookups have read and that wait for `admit_near`."""
        return self._near.rows

    @property
    def plain(self) -> Float32 | None:
        return self._rows.plain if self.whole else None

    @property
    def plain_slots(self) -> Float32 | None:
        return self._rows.plain_slots if self.whole else None

    def slabs(self) -> tuple[Slab, ...] | None:
        return self._rows.slabs() if self.whole else None

    @property
    def changed(self) -> int:
        """Rows that are not in the tier as they are."""
        return int(np.count_nonzero(self._state.array)) if self._frames is None else self._frames.changed

    @property
    def pressed(self) -> bool:
        """Whether so many rows have changed that soon there are no frames for others."""
        return self._frames is not None and self._frames.more_changed_than(self._frames.count // _PRESSED_SHARE)

    def grow(self, rows: int) -> None:
        if rows <= self._positions:
            return
        if self._frames is None:
            self._rows.grow(rows)
            self._state.grow(rows)
        else:
            self._frames.grow_positions(rows)
        self._positions = rows
        self._stored.budget.declare(self, self._need(), self._resize)

    def admit_near(self) -> None:
        """Gives frames to rows that lookups have read, as far as there are any to give; in one thread alone."""
        frames = self._frames
        for positions, records in self._near.drain() if self._near.rows else ():
            if frames is None or records.shape[1] < self.layout.record_bytes:
                continue
            _, cold = frames.find(positions)
            taken = frames.take(len(cold))
            cold = cold[: len(taken)]
            self.layout.unpack(records, cold, self._parts, taken)
            frames.put_in(positions[cold], taken)

    @property
    def unsettled(self) -> bool:
        """Whether lookups have read so many rows without frames that it shows which of them come again.

        The more frames, the more reads: a row that deserves a frame comes the less often.
        """
        frames = 0 if self._frames is None else self._frames.count
        return self._missed.count > min(max(frames, _FEWEST_MISSED), _MOST_MISSED)

    def read_again(self) -> Int64:
        """Positions of rows that lookups have read more than once, for `settle`; counting begins anew."""
        return self._missed.again()

    def settle(self, again: Int64) -> None:
        """Gives frames to rows that lookups have read again and again; in one thread alone.

        Args:
            again: From `read_again`; some may have no row any more.

        Raises:
            StoreBroken, StoreFailed: as `Tier.read`; nothing has changed.
        """
        frames = self._frames
        if frames is None or not len(again):
            return
        again = again[frames.find(again)[1]]
        taken = frames.take(len(again), passes=1)
        again = again[: len(taken)]
        try:
            records, there = self._stored.read_some(again, self.layout.record_bytes)
        except BaseException:
            frames.give_back(taken)
            raise
        used = taken[: len(there)]
        frames.give_back(taken[len(there) :])
        self.layout.unpack(records, there, self._parts, used)
        frames.put_in(again[there], used)

    @property
    def swollen(self) -> bool:
        """Whether changes have taken more frames than the table's share has, and have not needed them for a while."""
        frames, since = self._frames, self._swollen_at
        if frames is None or since is None or time.monotonic() - since < _SWOLLEN_S or frames.held:
            return False
        return frames.changed <= self._wanted(self._share)

    def shrink(self) -> None:
        """Gives the memory of such frames back; in one thread alone."""
        if self.swollen:
            self._swollen_at = None
            self._resize(self._share)

    def _hold(self, rows: int, new_slab: SlabMaker) -> None:
        """Makes room in memory for so many rows."""
        parts = RowParts(new_slab)
        self._rows = ResidentRows(self._spec, self._optimizer, rows, parts)
        self._parts = parts.slabs

    def _need(self) -> int:
        return self._positions * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return sum(slab.array.shape[1] * slab.array.itemsize for slab in self._parts.values())

    def _wanted(self, share: int) -> int:
        return max(_LEAST_FRAMES, min(share // self._row_bytes, self._positions))

    def _resize(self, share: int) -> None:
        """Takes as much memory as this share allows."""
        self._share = share
        if self._frames is None:
            if share < self._need():
                self._change_frames(self._wanted(share))
            return
        wanted, count = self._wanted(share), self._frames.count
        if wanted > count:
            self._rows.grow(wanted)
            self._frames.add_frames(wanted)
        elif wanted < _SHRINK_BELOW * count:
            self._change_frames(wanted)

    def _change_frames(self, wanted: int) -> None:
        """Keeps rows in `wanted` frames from now on, or as many as it takes for those that are not clean."""
        self.admit_near()
        before, parts = self._frames, self._parts
        if self._untouched:
            kept = np.empty(0, np.int64)
        elif before is None:
            state = self._state.array[:, 0]
            unclean, clean = np.flatnonzero(state), np.flatnonzero(state == CLEAN)
            kept = np.concatenate((unclean, clean[: max(0, wanted - len(unclean))]))
        else:
            kept = before.kept(wanted)
        state = self._state.array[kept, 0] if before is None else before.state[kept]
        positions = kept if before is None else before.positions(kept)
        frames = RowFrames(self._positions, max(wanted, len(kept)))
        self._hold(frames.count, anonymous_slab)
        taken = frames.take(len(kept))
        for part, slab in parts.items():
            if slab.array.shape[1]:
                self._parts[part].array[taken] = slab.array[kept]
        frames.put_in(positions, taken)
        frames.state[taken] = state
        self._frames, self._brought = frames, None
