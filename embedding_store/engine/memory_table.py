"""One table in memory, and what a commit does to it, step by step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import (
    Commit,
    EvictionCut,
    RowBlock,
    StayingRows,
    TableUpdate,
    UpdateBatch,
)
from elastable.embedding_store.engine.dense_replay.table_replay import DenseReplay
from elastable.embedding_store.engine.imaged_table import ImagedTable
from elastable.embedding_store.native.range_pool import RangePool
from elastable.embedding_store.rows.row_dtypes import round_update

__all__ = ["MemoryTable", "StagedUpdate"]

_FRESH_A_THREAD = 1 << 12
_FOUND_A_THREAD = 1 << 14


@dataclass(slots=True)
class StagedUpdate:
    """An update that cannot fail any more.

    Attributes:
        batch: The step on the rows that are admitted; their positions are known once they are claimed.
        block: New rows, where the optimizer is not fused and has run already.
        sighted: int64, the ids that a table with admission counts once more.
        refused: How many ids were left out, as they are not admitted yet.
    """

    batch: UpdateBatch
    block: RowBlock | None
    sighted: Int64 | None = None
    refused: int = 0


class MemoryTable(ImagedTable):
    """A table that is committed to: `stage`, `claim`, `apply`, then `follow` or `stay`, and `evict`."""

    def stage(self, update: TableUpdate, step: int, rate: float) -> StagedUpdate:
        """Does everything about an update that can fail, and changes no row.

        Raises:
            MemoryError: no room for new rows.
            Exception: whatever an optimizer that is not fused raises.
        """
        whole = len(update.ids)
        update, sighted = self._members.screen(update, self._directory)
        ids, positions = update.ids, self._positions.take(len(update.ids))
        batch = UpdateBatch(ids, positions, update.gradients, step, rate, update.row_squares)
        block = None
        if not self.optimizer.fused:
            block = self._block(ids)
            self.optimizer.apply(block.weights, block.slots, batch.at(np.arange(len(ids))))
            round_update(self.spec, ids, step, block.weights)
        self._reserve(ids)
        return StagedUpdate(batch, block, sighted, whole - len(ids))

    def claim(self, staged: StagedUpdate, pool: RangePool, version: int) -> None:
        """Gives every id of the update a row, with initial values where it is new; all are touched at `version`."""
        ids, positions = staged.batch.ids, staged.batch.positions
        self._room(ids)  # there is room already, unless the table was cleared since
        if self._directory.count == self._direct:
            staged.batch = staged.batch.at(positions := ids)  # every id has a row, at its own position
            fresh = ids[:0]
        else:
            fresh = self._places(ids, positions, pool)
        frames = self._rows.prepare(positions, fresh, pool)
        if frames is not None:
            staged.batch = replace(staged.batch, frames=frames)
        if self.versions:
            self._save(staged, fresh, pool)
        self._members.count(staged.sighted, staged.refused)
        self._members.touch(positions, fresh, version)
        if staged.block is None and len(fresh):
            fresh_ids, fresh_rows = ids[fresh], positions[fresh]

            def initialise(start: int, stop: int) -> None:
                self._rows.initialise(fresh_ids[start:stop], fresh_rows[start:stop])

            pool.run(initialise, len(fresh), _FRESH_A_THREAD)

    def _places(self, ids: Int64, positions: Int64, pool: RangePool) -> Int64:
        """`RowDirectory.claim`; ids that have a row, mostly all, are found by all threads."""
        strangers = np.flatnonzero(positions < 0) if self._find(ids, positions, pool) else positions[:0]
        if not len(strangers):
            return strangers
        places = np.empty(len(strangers), np.int64)
        fresh = strangers[self._directory.claim(ids[strangers], places)]
        positions[strangers] = places
        return fresh

    def _find(self, ids: Int64, positions: Int64, pool: RangePool) -> int:
        """`RowDirectory.find`, by all threads."""
        missing: list[int] = []

        def find(start: int, stop: int) -> None:
            missing.append(self._directory.find(ids[start:stop], positions[start:stop]))

        pool.run(find, len(ids), _FOUND_A_THREAD)
        return sum(missing)

    def follow(self, step: int, learning_rate: float, ends_chapter: bool) -> None:
        """Counts a step, for the rows that it did not update: one for every commit, whether it names the table or not.

        Args:
            step, ends_chapter: As of `Commit`.
            learning_rate: Of the step.
        """
        if self.replay is not None:
            self.replay.steps.take(step, learning_rate, ends_chapter)
            self._sweep(self.replay)

    def _sweep(self, replay: DenseReplay) -> None:
        """Keeps the steps few that the table remembers, once another one is taken."""
        replay.sweep(self._directory, self._rows, self._members, self.versions)

    def make_ready_to_follow(self) -> None:
        """Does what can fail about `follow`; no bit of what is read changes.

        Raises:
            ElastableError: rows that are to follow cannot be read.
        """

    def replay_step(self, step: int, rate: float, ends_chapter: bool) -> None:
        """Counts a step again, as `follow` did."""
        if self.replay is not None:
            self.replay.steps.prepare(step, rate)
            self.follow(step, rate, ends_chapter)

    def stay(self, ends_chapter: bool) -> None:
        """Counts no step: the table is frozen in this commit."""
        if self.replay is not None and ends_chapter:
            self.replay.steps.end_chapter()

    def staying(self, commit: Commit, time: float) -> StayingRows:
        """The rows that a commit would leave, but for `max_rows`."""
        update = None if self.spec.name in commit.frozen else commit.updates.get(self.spec.name)
        return self._members.staying(commit.version, update, self._directory, time)

    def evict(self, version: int, time: float | None = None, cut: EvictionCut | None = None) -> None:
        """Lets go of rows, as the table's eviction says for this version; cannot fail.

        Args:
            version: That is being committed.
            time: When, as of `Commit`.
            cut: What goes for `max_rows`, as of `Commit`.
        """
        self._removed.clear()
        if self.versions:
            self.versions.save_touch_times(self._members)
            self._save_unsettled()
            if self._members.counts_anew(version):
                self.versions.save_frequencies(self._members, self._directory.positions_given)
        self._members.evict(version, self._directory, self._remove, time, cut)

    def apply(self, staged: StagedUpdate, start: int, stop: int) -> None:
        """Updates the claimed rows `start..stop` of the update; ranges may run on different threads."""
        batch = staged.batch.part(start, stop)
        if staged.block is None:
            self._rows.update(batch)
        else:
            self._rows.write(batch.positions, staged.block.weights[start:stop], staged.block.slots[start:stop])

    def _save(self, staged: StagedUpdate, fresh: Int64, pool: RangePool) -> None:
        """Before rows of an update are changed; those at `fresh` are new."""
        positions = staged.batch.positions
        if len(fresh):
            positions = positions.copy()
            positions[fresh] = -1
        self.versions.save(staged.batch.ids, positions, self._rows, self._members, pool)
        if staged.sighted is not None and len(staged.sighted):
            self.versions.save_admission_counts(self._members)

    def _save_unsettled(self) -> None:
        """Before rows that were put without a version get this one."""
        ids = self._members.unsettled(self._directory)
        if ids is not None:
            self._save_of(ids)

    def _remove(self, ids: Int64) -> int:
        """Rows of `ids` int64 `[n]` are evicted; returns how many there were."""
        self._save_of(ids)
        self._removed.append(ids.copy())
        return self._take_away(ids)

    def _block(self, ids: Int64) -> RowBlock:
        """A copy of the rows of `ids`, initial ones for those that have none."""
        weights = np.empty((len(ids), self.spec.dim), np.float32)
        self.read(ids, weights)
        positions = np.empty(len(ids), np.int64)
        self._directory.find(ids, positions)
        slots = np.tile(self._initial_slots, (len(ids), 1))
        live = positions >= 0
        slots[live] = self._rows.block(positions[live])[1]
        return RowBlock(ids, weights, slots)
