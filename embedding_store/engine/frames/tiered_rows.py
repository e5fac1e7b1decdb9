"""Rows of a table with a tier behind: all of them in memory while there is room, else the hot ones in frames."""

from __future__ import annotations

import time

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64, UInt8
from elastable.embedding_store.contract.row_data import UpdateBatch
from elastable.embedding_store.engine.frames.frame_kernels import (
    CHANGED,
    CLEAN,
    collect_changed,
    mark_changed,
    mark_written,
)
from elastable.embedding_store.engine.frames.near_rows import once
from elastable.embedding_store.engine.frames.row_frames import RowFrames
from elastable.embedding_store.engine.frames.rows_in_memory import RowsInMemory
from elastable.embedding_store.native.range_pool import RangePool, WorkCounter, join_work, leave_work

__all__ = ["TieredRows"]


class TieredRows(RowsInMemory):
    """Rows that are written behind to a tier.

    While all of them fit into the table's share of memory, row i lies at position i as in `ResidentRows`, and what is
    read costs nothing more. A table that outgrows its share keeps its hot rows in frames: `find` says where, and the
    other rows are read from the tier. A row that has changed has a frame until it is written. A commit that changes
    more rows than there are frames gets more of them; they are given back once nobody has needed them for a while.
    """

    def allocate(self, positions: Int64) -> None:
        """As in `TableRows.allocate`: every position has a frame afterwards; what is in it has to be written.

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
        self.admit_near()
        frames, cold = self._frames.find(positions)
        if not len(cold):
            self._frames.hold(frames)
            self._brought = positions, frames
            return
        self._frames.hold(frames[frames >= 0])
        absent = once(positions[cold])
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
        absent = once(absent)
        near = np.zeros(len(absent), np.bool_)
        for indices, _, _ in self._near.find(absent):
            near[indices] = True
        return absent[~near]

    def prepare(self, positions: Int64, fresh: Int64, pool: RangePool) -> Int64 | None:
        """As in `TableRows.prepare`; rows that were not brought before are brought now.

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
            self.admit_near()
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
