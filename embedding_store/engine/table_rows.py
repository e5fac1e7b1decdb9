"""The rows of a table by position: all of them in memory while there is room, else the hot ones in frames."""

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int64, UInt8
from elastable.embedding_store.contract.row_data import UpdateBatch
from elastable.embedding_store.contract.spec import TableSpec
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
from elastable.embedding_store.engine.tiered.tier_records import (
    PrefetchedRecords,
    RecordLayout,
    RepeatedReads,
    TierRecords,
)
from elastable.embedding_store.native.range_pool import RangePool, WorkCounter, join_work, leave_work
from elastable.embedding_store.native.row_gather import can_stream, gather, scatter_rows
from elastable.embedding_store.native.slab import Slab, SlabMaker, anonymous_slab
from elastable.embedding_store.optimizers.base import RowOptimizer
from elastable.embedding_store.optimizers.dense_replay.table_steps import TableSteps
from elastable.embedding_store.tables.row_dtypes import row_values

_LEAST_FRAMES = 64
_PRESSED_SHARE = 4  # one frame in so many
_FEWEST_MISSED, _MOST_MISSED = 1 << 12, 1 << 18  # reads of rows without frames, until rows that came again get some
_SHRINK_BELOW = 0.75  # of the frames that there are
_SWOLLEN_S = 10.0  # for which frames that one change took beyond the share are kept: the next one may need as many
_SCRATCH_ROWS = 1 << 13


class TableRows:
    """Weights and slots at positions 0, 1, 2, ...

    Different positions may be read, written and updated from different threads. Positions are there once in each call
    that changes rows.

    While all rows fit into the table's share of memory, row i lies at position i. A table with a tier that outgrows its
    share keeps its hot rows in frames, and the other rows are read from the tier. A row that has changed has a frame
    until it is written. A commit that changes more rows than there are frames gets more of them; they are given back
    once nobody has needed them for a while.

    Rows that follow steps have one more slot, the last: up to which step they are caught up. What is read (`read`,
    `block`) is of the present, and nothing is written by reading it; what is written is taken to be of the present.
    That slot is seen in what `copy` gives alone.

    Attributes:
        plain: Weights float32 `[rows, dim]` as `RowValues.plain`; None where they do not lie so in memory, or are
            caught up as they are read.
        whole: Whether every row is in memory, at its position.
        framed: Whether hot rows lie in frames as float32, as `read_together` needs them.
        layout: Of a row in the tier.
        prefetched: Records that lookups have read and that wait for `admit_prefetched`.
        missed: Rows without frames that lookups have read, for `settle`.
    """

    plain: Float32 | None = None

    def __init__(
        self,
        spec: TableSpec,
        optimizer: RowOptimizer,
        rows: int,
        new_slab: SlabMaker = anonymous_slab,
        stored: TierRecords | None = None,
        steps: TableSteps | None = None,
    ) -> None:
        """Room for `rows` rows.

        Args:
            spec: The table.
            optimizer: Whose slots are kept.
            rows: None of which is in the tier.
            new_slab: Makes their memory, while all of them have room.
            stored: The table in its tier; None: it has none.
            steps: That rows follow, by a `CatchUpOptimizer`; None: only gradients move them.
        """
        self._spec, self._optimizer, self._stored = spec, optimizer, stored
        self._slot_width, self._initial_slots = optimizer.slot_width(spec.dim), optimizer.initial_slots(spec.dim)
        self._steps = steps
        self._step: int | None = None  # as of which rows are read; None: the present one
        # Where moments alone decay, weights are current, and are read as any others.
        self._moving = steps is not None and steps.form.moves_weights
        self._positions = rows
        self._frames: RowFrames | None = None
        self._swollen_at: float | None = None  # when a change last needed more frames than the share has
        self._brought: tuple[Int64, Int64] | None = None  # positions and frames of the rows that change next
        self._hold(rows, new_slab)
        self.layout = RecordLayout(self._parts, spec.eviction is not None)
        if stored is not None:
            self.prefetched, self.missed = PrefetchedRecords(), RepeatedReads()
            self._cold = _ColdRows(spec, optimizer, stored, self.layout, self.prefetched)
            self._state = Slab(max(1, rows), 1, np.uint8)
            self._untouched = True
            self._share = 0
            stored.budget.declare(self, self._need(), self._resize)

    def _hold(self, rows: int, new_slab: SlabMaker) -> None:
        """Makes room in memory for so many rows."""
        parts: dict[str, Slab] = {}

        def new_part(part: str, rows: int, columns: int, dtype: npt.DTypeLike = np.float32, /) -> Slab:
            parts[part] = new_slab(part, rows, columns, dtype)
            return parts[part]

        weights, slots = row_values(self._spec, rows, new_part), new_part("slots", rows, self._slot_width)
        self._weights, self._slots, self._parts = weights, slots, parts
        self._show()

    def _show(self) -> None:
        self.whole = self._frames is None
        self.plain = self._weights.plain if self.whole and not self._moving else None
        self.framed = not self.whole and self._weights.plain is not None and not self._moving

    def grow(self, rows: int) -> None:
        """Makes room for `rows` rows. Raises `MemoryError`, and nothing has changed."""
        if rows <= self._positions:
            return
        if self._frames is not None:
            self._frames.grow_positions(rows)
        else:
            self._grow_slabs(rows)
            if self._stored is not None:
                self._state.grow(rows)
        self._positions = rows
        if self._stored is not None:
            self._stored.budget.declare(self, self._need(), self._resize)

    def _grow_slabs(self, rows: int) -> None:
        self.plain = None  # a slab that nobody looks at grows where it is
        try:
            self._weights.grow(rows)
            self._slots.grow(rows)
        finally:
            self._show()

    def close(self) -> None:
        """Gives back what is not memory."""
        if self._stored is not None:
            self._stored.budget.withdraw(self)

    def slabs(self) -> tuple[Slab, ...] | None:
        """`RowValues.slabs`; None: these rows are not for other processes to read."""
        return self._weights.slabs() if self._frames is None and not self._moving else None

    # Rows that follow steps

    @property
    def follows(self) -> bool:
        """Whether steps without a gradient move rows, so that `copy` gives other rows than `block`."""
        return self._steps is not None

    @property
    def untouched(self) -> np.float32:
        """What the initial values of rows that were never updated are multiplied by."""
        return np.float32(1) if self._steps is None else self._steps.at(self._step).kept

    def as_of(self, step: int | None) -> Self:
        """The same rows, to be read as they were at a step that is remembered (None: the present one)."""
        if self._steps is None:
            return self
        rows = copy.copy(self)
        rows._step = step
        return rows

    def seen(self, weights: Float32, slots: Float32) -> tuple[Float32, Float32]:
        """Rows that `copy` gave, as `block` would have given them; the arrays may be changed and returned."""
        if self._steps is None:
            return weights, slots
        order = np.arange(len(weights))
        self._steps.at(self._step).replay(weights, order, slots, order)
        return weights, slots[:, :-1].copy()

    def bring_to(self, positions: Int64, step: int) -> None:
        """Writes the rows at positions int64 `[n]` as of a step where a replay epoch ends, so that no later bit
        changes."""
        weights, slots = self.as_of(step).block(positions)
        self._write(positions, weights, _stamped(slots, step))

    def behind(self, positions: Int64, step: int) -> Int64:
        """Indices in `positions` int64 `[n]` of the rows that are not caught up to `step`."""
        kept: Int64 = self._block(positions)[1][:, -1].copy().view(np.int32).astype(np.int64)
        return np.flatnonzero((kept < step) & (kept > 0))

    # Reading

    def read(self, positions: Int64, out: Float32, stream: bool = False) -> None:
        """As `RowValues.read`."""
        if self._moving:
            self._read_moving(positions, out)
        elif self._frames is None:
            self._weights.read(positions, out, stream)
        else:
            plain = self._weights.plain
            if plain is not None:
                cold, unread = self._frames.gather(plain, positions, out, stream, self._cold.source(out))
            else:
                frames, cold = self._frames.find(positions, warm=True)
                self._weights.read(frames, out, stream)
                unread = cold
            self._read_cold(positions, cold, unread, out)

    def _read_moving(self, positions: Int64, out: Float32) -> None:
        live = np.flatnonzero(positions >= 0)
        weights = self._weights.plain
        if self._frames is not None or self._steps is None or weights is None:
            out[live] = self.block(positions[live])[0]
        elif len(live) == len(positions) and out.flags.c_contiguous:
            self._steps.at(self._step).read(weights, self._slots.array, positions, out)
        else:
            rows = np.empty((len(live), out.shape[1]), np.float32)
            self._steps.at(self._step).read(weights, self._slots.array, positions[live], rows)
            scatter_rows(rows, live, out)

    def read_together(self, positions: Int64, out: Float32, stream: bool, pool: RangePool) -> bool:
        """As `read` where the rows are `framed`, by all threads of a pool.

        Returns:
            Whether the table has all these positions.
        """
        frames, plain = self._frames, self._weights.plain
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
            self._cold.behind.reads.add(len(cold) - len(unread))  # which were read on the way
            if not self._cold.behind.tier.far:
                self.missed.add(positions[cold])

    def block(self, positions: Int64) -> tuple[Float32, Float32]:
        """Copies of weights float32 `[n, dim]` and slots float32 `[n, slot_width]`; no negative positions."""
        return self.seen(*self._block(positions))

    def _block(self, positions: Int64) -> tuple[Float32, Float32]:
        """As `block`, with the last slot."""
        weights = np.empty((len(positions), self._spec.dim), np.float32)
        if self._frames is None:
            self._weights.read(positions, weights)
            return weights, self._slots.array[positions]
        slots = np.empty((len(positions), self._slot_width), np.float32)
        frames, cold = self._frames.find(positions)
        here = np.flatnonzero(frames >= 0)
        self._weights.read(frames, weights)
        slots[here] = self._slots.array[frames[here]]
        for some, scratch in self._cold.rows(positions, cold, whole=True):
            weights[some], slots[some] = scratch.block(np.arange(len(some)))
        return weights, slots

    def copy(self, positions: Int64, weights: Float32, slots: Float32, stream: bool = False) -> None:
        """Rows as they lie, into `weights` float32 `[n, dim]` and `slots` float32 `[n, kept_width]`, both contiguous.

        Rows of both at negative positions are left alone. `stream` as in `RowValues.read`, for the weights.
        """
        lie, cold = (positions, positions[:0]) if self._frames is None else self._frames.find(positions)
        self._weights.read(lie, weights, stream)
        if slots.shape[1]:
            gather(self._slots.array, lie, slots, stream and can_stream(slots))
        if len(cold):
            weights[cold], slots[cold] = self._block(positions[cold])

    # Changes

    def prepare(self, positions: Int64, fresh: Int64) -> Int64 | None:
        """Prepares for a change of rows, in one thread alone: those that were not brought before are brought now.

        Args:
            positions: int64 `[n]`, all of them.
            fresh: int64 `[m]`, indices in `positions` of those that hold no values yet.

        Returns:
            int64 `[n]`: the rows' frames, which they keep until `release`, for `UpdateBatch.frames`; None where rows
            have none.
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

    def write(self, positions: Int64, weights: Float32, slots: Float32) -> None:
        """Weights float32 `[n, dim]` and slots float32 `[n, slot_width]` as they are."""
        self._write(positions, weights, slots if self._steps is None else _stamped(slots, self._steps.now))

    def _write(self, positions: Int64, weights: Float32, slots: Float32) -> None:
        frames = self._changing(positions)
        if self._frames is not None:
            self._frames.may_change(len(frames))
        self._weights.write(frames, weights)
        self._slots.array[frames] = slots

    def initialise(self, ids: Int64, positions: Int64) -> None:
        """The weights and slots that `ids` int64 `[n]` have before their first update."""
        frames = self._changing(positions)
        self._weights.initialise(ids, frames)
        self._slots.array[frames] = self._initial_slots

    def update(self, batch: UpdateBatch) -> None:
        """One step of the table's (fused) optimizer on the rows of a batch, which lie at `batch.positions`."""
        if self._stored is not None:
            frames = batch.frames
            if frames is not None and self._frames is not None and self._still_there(frames):
                self._untouched = False
                mark_changed(self._frames.state, frames)
            else:
                frames = self._changing(batch.positions)
            batch = batch if self._frames is None else batch.at(frames)
        if self.plain is None:
            self._weights.update(self._optimizer, self._slots.array, batch)
        else:
            self._optimizer.apply(self.plain, self._slots.array, batch)

    def _still_there(self, frames: Int64) -> bool:
        """Whether frames that `prepare` gave, or a part of them, still hold the same rows."""
        return self._brought is not None and (frames is self._brought[1] or frames.base is self._brought[1])

    def _changing(self, positions: Int64) -> Int64:
        """Where rows lie that are about to change."""
        if self._stored is None:
            return positions
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

    # Rows with a tier behind: which of them are in memory

    @property
    def changed(self) -> int:
        """Rows that are not in the tier as they are."""
        return int(np.count_nonzero(self._state.array)) if self._frames is None else self._frames.changed

    def differ(self, positions: Int64) -> npt.NDArray[np.bool_]:
        """Of positions int64 `[n]`, whether each one's row is not in the tier as it is: bool `[n]`."""
        if self._frames is None:
            return self._state.array[positions, 0] != CLEAN  # type: ignore[no-any-return]
        frames, cold = self._frames.find(positions)
        found: npt.NDArray[np.bool_] = self._frames.state[frames] != CLEAN
        found[cold] = False
        return found

    @property
    def pressed(self) -> bool:
        """Whether so many rows have changed that soon there are no frames for others."""
        return self._frames is not None and self._frames.more_changed_than(self._frames.count // _PRESSED_SHARE)

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
        return self.missed.count > min(max(frames, _FEWEST_MISSED), _MOST_MISSED)

    def settle(self, again: Int64) -> None:
        """Gives frames to rows that lookups have read again and again; in one thread alone.

        Args:
            again: From `missed.again`; some may have no row any more.

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
            records, there = self._cold.behind.read_some(again, self.layout.record_bytes)
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
            self._grow_slabs(wanted)
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
        self._show()

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
        records = self._cold.behind.read(absent, self.layout.record_bytes) if loaded else None
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

    def forget(self, positions: Int64) -> None:
        """There are no rows at positions int64 `[n]`, each once, any more."""
        if self._frames is None:
            self._state.array[positions, 0] = CLEAN
        else:
            self.admit_prefetched()
            self._brought = None
            self._frames.free(positions)

    def load(self, records: UInt8, indices: Int64, positions: Int64) -> None:
        """Takes record `indices[i]`, or the first bytes of it, as the row at `positions[i]`; all rows have room."""
        assert self._frames is None
        self._untouched = False
        self.layout.unpack(records, indices, self._parts, positions)

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

    def _give_frames(self, frames: RowFrames, positions: Int64, records: UInt8 | None = None) -> None:
        """Gives a frame to each position int64 `[n]`, which has none, and holds it."""
        if not len(positions):
            return
        taken = frames.take(len(positions))
        try:
            if len(taken) < len(positions):
                self._cold.behind.make_clean()
                taken = np.concatenate((taken, frames.take(len(positions) - len(taken))))
            if len(taken) < len(positions):
                count = frames.count + len(positions) - len(taken)
                self._grow_slabs(count)
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


def _stamped(slots: Float32, step: int) -> Float32:
    """Slots float32 `[n, width]` as a table keeps them, float32 `[n, width + 1]`, caught up to a step."""
    kept = np.empty((len(slots), slots.shape[1] + 1), np.float32)
    kept[:, :-1] = slots
    kept.view(np.int32)[:, -1] = step
    return kept


@dataclass(frozen=True, eq=False, slots=True)
class _ColdRows:
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
        if self.spec.dtype == "float32" and not self.behind.tier.far:
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
        return ColdSource(records, self.behind.row_ids(), out.view(np.uint8).reshape(-1))

    def rows(self, positions: Int64, cold: Int64, whole: bool = False) -> Iterator[tuple[Int64, TableRows]]:
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

    def in_scratch(self, cold: Int64, records: UInt8, places: Int64) -> Iterator[tuple[Int64, TableRows]]:
        """Of records uint8 `[m, bytes]` those at `places` int64 `[n]`, some at a time, with their part of `cold`."""
        scratch = TableRows(self.spec, self.optimizer, min(len(cold), _SCRATCH_ROWS))
        for start in range(0, len(cold), _SCRATCH_ROWS):
            some = places[start : start + _SCRATCH_ROWS]
            scratch.load(records, some, np.arange(len(some)))
            yield cold[start : start + _SCRATCH_ROWS], scratch
