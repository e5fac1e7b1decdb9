"""Rows of a table with a tier behind: all of them in memory while there is room, else the hot ones in frames."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64, UInt8
from elastable.embedding_store.contract.row_data import UpdateBatch
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.table_rows import ResidentRows, TableRows
from elastable.embedding_store.engine.tiered.row_frames import (
    CHANGED,
    CLEAN,
    NOWHERE,
    ColdSource,
    RowFrames,
    collect_changed,
    mark_changed,
    mark_written,
)
from elastable.embedding_store.engine.tiered.tier_records import RecordLayout, RowParts, TierRecords
from elastable.embedding_store.native.range_pool import RangePool, WorkCounter, join_work, leave_work
from elastable.embedding_store.native.slab import Slab, SlabMaker, anonymous_slab
from elastable.embedding_store.optimizers.base import RowOptimizer

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


_SCRATCH_ROWS = 1 << 13


@dataclass(frozen=True, eq=False, slots=True)
class ColdRows:
    """Reads rows of one table. Many threads may, at the same time.

    Attributes:
        spec, optimizer, layout: Of the table.
        behind: The table in its tier.
        prefetched: Records that lookups have read.
    """

    spec: TableSpec
    optimizer: RowOptimizer
    behind: TierRecords
    layout: RecordLayout
    prefetched: PrefetchedRecords

    def read(self, positions: Int64, cold: Int64, out: Float32) -> None:
        """Rows `positions[cold]` into `out[cold]`, float32 `[n, dim]`, whose rows may lie apart."""
        if self.spec.dtype == "float32" and not self.behind.far:
            out[cold] = self.behind.read(positions[cold], self.layout.slots_at).view(np.float32)
            return
        for some, scratch in self.rows(positions, cold):
            rows = np.empty((len(some), self.spec.dim), np.float32)
            scratch.read(np.arange(len(some)), rows)
            out[some] = rows

    def source(self, out: Float32) -> ColdSource:
        """What a gather into `out` float32 `[n, dim]` reads cold rows from on the way."""
        width = self.layout.slots_at
        if self.spec.dtype != "float32" or not out.flags.c_contiguous:
            return NOWHERE
        records = self.behind.mapped()
        if records is None or records.first != width or out.shape[1] * out.itemsize != width:
            return NOWHERE
        of = records.file, records.begin, records.items, records.first, records.stride
        return ColdSource(*of, self.behind.row_ids(), out.view(np.uint8).reshape(-1))

    def rows(self, positions: Int64, cold: Int64, whole: bool = False) -> Iterator[tuple[Int64, ResidentRows]]:
        """Rows that are not in memory, some at a time, in the first rows of a scratch, and their indices."""
        if not len(cold):
            return
        left = np.ones(len(cold), np.bool_)
        for indices, records, places in self.prefetched.find(positions[cold]):
            if not whole or records.shape[1] == self.layout.record_bytes:
                left[indices] = False
                yield from self.in_scratch(cold[indices], records, places)
        absent = cold[left]
        if len(absent):
            once, places = np.unique(positions[absent], return_inverse=True)
            records = self.behind.read(once, self.layout.record_bytes if whole else self.layout.slots_at)
            yield from self.in_scratch(absent, records, places.reshape(-1))

    def in_scratch(self, cold: Int64, records: UInt8, places: Int64) -> Iterator[tuple[Int64, ResidentRows]]:
        """Of records uint8 `[m, bytes]` those at `places` int64 `[n]`, some at a time, with their part of `cold`."""
        parts = RowParts(anonymous_slab)
        scratch = ResidentRows(self.spec, self.optimizer, min(len(cold), _SCRATCH_ROWS), parts)
        for start in range(0, len(cold), _SCRATCH_ROWS):
            some = places[start : start + _SCRATCH_ROWS]
            self.layout.unpack(records, some, parts.slabs, np.arange(len(some)))
            yield cold[start : start + _SCRATCH_ROWS], scratch


_LEAST_FRAMES = 64
_PRESSED_SHARE = 4  # one frame in so many
_FEWEST_MISSED, _MOST_MISSED = 1 << 12, 1 << 18  # reads of rows without frames, until rows that came again get some
_SHRINK_BELOW = 0.75  # of the frames that there are
_SWOLLEN_S = 10.0  # for which frames that one change took beyond the share are kept: the next one may need as many


class TieredRows(TableRows):
    """Rows that are written behind to a tier.

    While all of them fit into the table's share of memory, row i lies at position i as in `ResidentRows`, and what is
    read costs nothing more. A table that outgrows its share keeps its hot rows in frames: `find` says where, and the
    other rows are read from the tier. A row that has changed has a frame until it is written. A commit that changes
    more rows than there are frames gets more of them; they are given back once nobody has needed them for a while.

    Attributes:
        layout: Of a row in the tier.
        prefetched: Records that lookups have read and that wait for `admit_prefetched`.
    """

    def __init__(
        self, spec: TableSpec, optimizer: RowOptimizer, rows: int, stored: TierRecords, new_slab: SlabMaker
    ) -> None:
        """Room for `rows` rows, none of which is in the tier; `optimizer` is the one whose slots are kept."""
        self._spec, self._optimizer, self._stored = spec, optimizer, stored
        self._new_slab = new_slab
        self._positions = rows
        self._frames: RowFrames | None = None
        self.prefetched = PrefetchedRecords()
        self._missed = RepeatedReads()
        self._untouched = True
        self._share = 0
        self._swollen_at: float | None = None  # when a change last needed more frames than the share has
        self._brought: tuple[Int64, Int64] | None = None  # positions and frames of the rows that are changed next
        self._hold(rows, new_slab)
        self.layout = RecordLayout(self._parts, spec.eviction is not None)
        self._cold = ColdRows(spec, optimizer, stored, self.layout, self.prefetched)
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

    def admit_prefetched(self) -> None:
        """Gives frames to rows that lookups have read, as far as there are any to give; in one thread alone."""
        frames = self._frames
        for positions, records in self.prefetched.drain() if self.prefetched.rows else ():
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
        self.admit_prefetched()
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

    def allocate(self, positions: Int64) -> None:
        """Every position has a frame afterwards; what is in it has to be written.

        Raises:
            StoreFailed, Unavailable, DeadlineExceeded: changed rows would have to be written, and cannot be.
        """
        if self._frames is not None:
            frames, cold = self._frames.find(positions)
            self._frames.hold(frames[frames >= 0])
            self._give_frames(self._frames, positions[cold])

    def bring(self, positions: Int64, loaded: bool = True) -> None:
        """Brings rows at positions int64 `[n]` into memory, where they stay until `release`.

        `loaded`: False where they are overwritten next.

        Raises:
            StoreBroken: the tier has lost one of them.
            StoreFailed, Unavailable, DeadlineExceeded: nothing has changed.
        """
        if self._frames is None:
            return
        self.admit_prefetched()
        frames, cold = self._frames.find(positions)
        if not len(cold):
            self._frames.hold(frames)
            self._brought = positions, frames
            return
        self._frames.hold(frames[frames >= 0])
        absent = np.unique(positions[cold])
        records = self._stored.read(absent, self.layout.record_bytes) if loaded else None
        self._give_frames(self._frames, absent, records)

    def release(self) -> None:
        """What was brought may leave again."""
        self._brought = None
        if self._frames is not None:
            if self._swollen_at is not None and self._frames.held > self._wanted(self._share):
                self._swollen_at = time.monotonic()
            self._frames.release()
            self.shrink()

    def cold(self, positions: Int64) -> Int64:
        """Of positions int64 `[n]` those, each once, whose rows are neither in memory nor near."""
        if self._frames is None:
            return positions[:0]
        absent = positions[self._frames.find(positions)[1]]
        if not len(absent):
            return absent
        absent = np.unique(absent)
        near = np.zeros(len(absent), np.bool_)
        for indices, _, _ in self.prefetched.find(absent):
            near[indices] = True
        return absent[~near]

    def prepare(self, positions: Int64, fresh: Int64, pool: RangePool) -> Int64 | None:
        """Finds the frames of rows; those that were not brought before are brought now.

        Returns:
            int64 `[n]`: the rows' frames, which they keep until `release`; None where rows have none.
        """
        if self._frames is None:
            return None
        if self._brought is not None and np.array_equal(self._brought[0], positions):
            return self._brought[1]
        frames, cold = self._frames.find(positions)
        if len(cold):
            known = np.ones(len(positions), np.bool_)
            known[fresh] = False
            self.bring(positions[known])
            self.allocate(positions[fresh])
            frames, _ = self._frames.find(positions)
        self._brought = positions.copy(), frames  # callers use their array again
        return frames

    def read(self, positions: Int64, out: Float32, stream: bool = False) -> None:
        if self._frames is None:
            self._rows.read(positions, out, stream)
            return
        plain = self._rows.plain
        if plain is not None:
            cold, unread = self._frames.gather(plain, positions, out, stream, self._cold.source(out))
        else:
            frames, cold = self._frames.find(positions, warm=True)
            self._rows.read(frames, out, stream)
            unread = cold
        self._read_cold(positions, cold, unread, out)

    def read_together(self, positions: Int64, out: Float32, stream: bool, pool: RangePool) -> bool:
        """As `read` where the rows are `framed`, by all threads of a pool.

        Returns:
            Whether the table has all these positions.
        """
        frames, plain = self._frames, self._rows.plain
        assert frames is not None
        assert plain is not None
        counter, failures = WorkCounter(pool.threads), list[BaseException]()
        source = self._cold.source(out)

        def work() -> None:
            join_work(counter.state)
            try:
                cold, unread = frames.gather(plain, positions, out, stream, source, counter)
                self._read_cold(positions, cold, unread, out)
            except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
                failures.append(error)
            finally:
                leave_work(counter.state)

        pool.together(work, counter)
        if failures:
            raise failures[0]
        return not counter.failed

    def _read_cold(self, positions: Int64, cold: Int64, unread: Int64, out: Float32) -> None:
        """Reads rows `positions[unread]`, of those at `cold`, that have no frame."""
        if len(unread):
            self._cold.read(positions, unread, out)
        if len(cold):
            self._stored.reads.add(len(cold) - len(unread))  # which were read on the way
            if not self._stored.far:
                self._missed.add(positions[cold])

    def block(self, positions: Int64) -> tuple[Float32, Float32]:
        if self._frames is None:
            return self._rows.block(positions)
        weights = np.empty((len(positions), self._spec.dim), np.float32)
        slots = np.empty((len(positions), self._optimizer.slot_width(self._spec.dim)), np.float32)
        frames, cold = self._frames.find(positions)
        here = np.flatnonzero(frames >= 0)
        weights[here], slots[here] = self._rows.block(frames[here])
        for some, scratch in self._cold.rows(positions, cold, whole=True):
            weights[some], slots[some] = scratch.block(np.arange(len(some)))
        return weights, slots

    def copy(self, positions: Int64, weights: Float32, slots: Float32, stream: bool = False) -> None:
        if self._frames is None:
            self._rows.copy(positions, weights, slots, stream)
            return
        frames, cold = self._frames.find(positions)
        self._rows.copy(frames, weights, slots, stream)
        if len(cold):
            weights[cold], slots[cold] = self.block(positions[cold])

    def write(self, positions: Int64, weights: Float32, slots: Float32) -> None:
        frames = self._changing(positions)
        if self._frames is not None:
            self._frames.may_change(len(frames))
        self._rows.write(frames, weights, slots)

    def initialise(self, ids: Int64, positions: Int64) -> None:
        frames = self._changing(positions)
        self._rows.initialise(ids, frames)

    def update(self, batch: UpdateBatch) -> None:
        frames = batch.frames
        if frames is not None and self._frames is not None and self._still_there(frames):
            self._untouched = False
            mark_changed(self._frames.state, frames)
        else:
            frames = self._changing(batch.positions)
        self._rows.update(batch if self._frames is None else batch.at(frames))

    def forget(self, positions: Int64) -> None:
        """There are no rows at positions int64 `[n]`, each once, any more."""
        if self._frames is None:
            self._state.array[positions, 0] = CLEAN
        else:
            self.admit_prefetched()
            self._brought = None
            self._frames.free(positions)

    def load(self, positions: Int64, records: UInt8) -> None:
        """Takes whole records from the tier, as rows that all have room."""
        assert self._frames is None
        self._untouched = False
        self.layout.unpack(records, np.arange(len(positions)), self._parts, positions)

    def capture(self, cursor: int, most: int) -> tuple[Int64, UInt8, int]:
        """Takes up to `most` changed rows as they are, from `cursor` on; they count as being written.

        Returns:
            positions: int64 `[n]`.
            records: uint8 `[n, record_bytes]`, without touches.
            cursor: The next one; -1: there is nothing more.
        """
        frames = np.empty(most, np.int64)
        state = self._state.array[:, 0] if self._frames is None else self._frames.state
        count, cursor = collect_changed(state, cursor, len(state), frames)
        frames = frames[:count]
        records = np.empty((count, self.layout.record_bytes), np.uint8)
        self.layout.pack(self._parts, frames, None, records)
        positions = frames if self._frames is None else self._frames.positions(frames)
        return positions.copy(), records, -1 if cursor >= len(state) else cursor

    def written(self, positions: Int64, done: bool) -> None:
        """Rows that were captured are in the tier now, or (`done` False) are not."""
        if self._frames is None:
            mark_written(self._state.array[:, 0], positions, CLEAN if done else CHANGED)
        else:
            mark_written(self._frames.state, self._frames.find(positions)[0], CLEAN if done else CHANGED)

    def close(self) -> None:
        self._stored.budget.withdraw(self)

    def _still_there(self, frames: Int64) -> bool:
        """Whether frames that `prepare` gave, or a part of them, still hold the same rows."""
        return self._brought is not None and (frames is self._brought[1] or frames.base is self._brought[1])

    def _changing(self, positions: Int64) -> Int64:
        """Frames of rows that are about to change."""
        self._untouched = False
        if self._frames is None:
            mark_changed(self._state.array[:, 0], positions)
            return positions
        frames, cold = self._frames.find(positions)
        if len(cold):
            self._give_frames(self._frames, positions[cold])
            frames, _ = self._frames.find(positions)
        mark_changed(self._frames.state, frames)
        return frames

    def _give_frames(self, frames: RowFrames, positions: Int64, records: UInt8 | None = None) -> None:
        """Gives a frame to each position int64 `[n]`, which has none, and holds it."""
        if not len(positions):
            return
        taken = frames.take(len(positions))
        try:
            if len(taken) < len(positions):
                self._stored.make_clean()
                taken = np.concatenate((taken, frames.take(len(positions) - len(taken))))
            if len(taken) < len(positions):
                count = frames.count + len(positions) - len(taken)
                self._rows.grow(count)
                frames.add_frames(count)
                self._swollen_at = time.monotonic()
                taken = np.concatenate((taken, frames.take(len(positions) - len(taken))))
        except BaseException:
            frames.give_back(taken)
            raise
        if records is not None:
            self.layout.unpack(records, np.arange(len(positions)), self._parts, taken)
        frames.put_in(positions, taken)
        frames.hold(taken)
