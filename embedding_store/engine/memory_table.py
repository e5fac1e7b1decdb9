"""One table in memory: a directory of its ids, and its rows by position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import RowBlock, TableState, TableStatistics, TableUpdate
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.update_batch import UpdateBatch
from elastable.embedding_store.engine.following.following_table import following
from elastable.embedding_store.engine.membership.row_membership import RowMembership
from elastable.embedding_store.engine.pinned_table import PinnedTable
from elastable.embedding_store.engine.table_rows import MakeRows, TableRows, resident_rows
from elastable.embedding_store.engine.table_versions import TableVersions
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.ids.id_index import IdIndex
from elastable.embedding_store.native.ids.row_directory import DirectRows, RowDirectory
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.embedding_store.native.row_gather import scale_rows
from elastable.embedding_store.native.slab import Slab, SlabMaker, anonymous_slab
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.rows.row_dtypes import round_update
from elastable.embedding_store.support.scratch import Scratch
from elastable.embedding_store.tables.table_reader import TableReader

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


class MemoryTable(TableReader):
    """The rows of one table. Ids handed in have been checked; callers do the locking.

    A fixed table whose rows all fit into `direct_bytes` keeps row i at
    position i. Any other keeps rows in first-come order behind a hash index,
    so that memory grows with the rows that were touched and not with the pages
    that they would be strewn over.

    Attributes:
        versions: Those that are pinned; whatever changes rows tells them before.
    """

    _directory: RowDirectory
    _rows: TableRows

    def __init__(
        self,
        spec: TableSpec,
        direct_bytes: int,
        new_slab: SlabMaker = anonymous_slab,
        make_rows: MakeRows | None = None,
    ) -> None:
        """Args are those of the table; `new_slab` holds its directory, and its rows unless `make_rows` does.

        Raises:
            BadSpec: an optimizer that is not known here.
        """
        self._new_slab = new_slab
        self._make_rows = resident_rows(new_slab) if make_rows is None else make_rows
        self.optimizer = row_optimizer(spec.optimizer)
        self.following = following(spec, self.optimizer)
        if self.following is not None:
            self._make_rows = self.following.rows(self._make_rows)
        self.slot_width = self.optimizer.slot_width(spec.dim)
        self._initial_slots = self.optimizer.initial_slots(spec.dim)
        kept_width = self.slot_width + (self.following is not None)
        self._row_bytes = spec.weight_bytes + 4 * kept_width
        size = spec.vocabulary_size
        self._direct = size if size is not None and size * self._row_bytes <= direct_bytes else None
        # Of updates: they are claimed and applied one at a time.
        self._positions = Scratch(np.int64)
        self._deleted = self._written = 0
        super().__init__(spec, *self._empty(spec))
        self._members = RowMembership(spec, self._directory.capacity, new_slab)
        steps = None if self.following is None else self.following.steps
        self.versions = TableVersions(spec, kept_width, steps, self._direct)

    @property
    def count(self) -> int:
        """Rows that hold a value of their own."""
        return self._directory.count

    @property
    def direct(self) -> bool:
        """Whether row i lies at position i; else an index says where."""
        return self._direct is not None

    def reading_slabs(self) -> tuple[tuple[Slab, ...], tuple[Slab, ...]] | None:
        """What `read` reads: the slabs of the directory and those of the weights; None: not only slabs."""
        values = self._rows.slabs()
        return None if values is None else (self._directory.slabs(), values)

    def at(self, version: int) -> PinnedTable:
        """The table as it was at a pinned version, to read before anything changes."""
        since = self.versions.since(version)
        rows = self._rows.as_of(self.versions.step(version))
        standing = (self._directory, rows, self._members)
        return PinnedTable(self.spec, *standing, since, self.versions.sequence, self.following)

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
        self._reserve(ids)  # there is room already, unless the table was cleared since
        if self._directory.count == self._direct:
            staged.batch = staged.batch.at(positions := ids)  # every id has a row, at its own position
            fresh = ids[:0]
        else:
            fresh = self._places(ids, positions, pool)
        self._rows.prepare(positions, fresh, pool)
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

        missing: list[int] = []

        def find(start: int, stop: int) -> None:
            missing.append(self._directory.find(ids[start:stop], positions[start:stop]))

        pool.run(find, len(ids), _FOUND_A_THREAD)
        strangers = np.flatnonzero(positions < 0) if any(missing) else positions[:0]
        if not len(strangers):
            return strangers
        places = np.empty(len(strangers), np.int64)
        fresh = strangers[self._directory.claim(ids[strangers], places)]
        positions[strangers] = places
        return fresh

    def follow(self, step: int, learning_rate: float, ends_chapter: bool) -> None:
        """Counts a step, for the rows that it did not update: one for every commit, whether it names the table or not.

        Args:
            step, ends_chapter: As of `Commit`.
            learning_rate: Of the step.
        """
        if self.following is not None:
            held = (self._directory, self._rows, self._members, self.versions)
            self.following.take(step, learning_rate, ends_chapter, *held)

    def stay(self, ends_chapter: bool) -> None:
        """Counts no step: the table is frozen in this commit."""
        if self.following is not None and ends_chapter:
            self.following.steps.end_chapter()

    def evict(self, version: int) -> None:
        """Lets go of rows, as the table's eviction says for this version; cannot fail."""
        if self.versions:
            self._save_unsettled()
            if self._members.counts_anew(version):
                self.versions.save_frequencies(self._members, self._directory.positions_given)
        self._members.evict(version, self._directory, self._remove)

    def apply(self, staged: StagedUpdate, start: int, stop: int) -> None:
        """Updates the claimed rows `start..stop` of the update; ranges may run on different threads."""
        batch = staged.batch.part(start, stop)
        if staged.block is None:
            self._rows.update(batch)
        else:
            self._rows.write(batch.positions, staged.block.weights[start:stop], staged.block.slots[start:stop])

    def put(self, block: RowBlock) -> None:
        """Writes rows as they are. Raises `MemoryError` before anything is changed."""
        self._reserve(block.ids)
        self._save_of(block.ids)
        positions = np.empty(len(block.ids), np.int64)
        self._directory.claim(block.ids, positions)
        self._rows.write(positions, block.weights, block.slots)
        self._members.put(positions, block.touches)
        self._written += len(block.ids)

    def settle(self, version: int) -> None:
        """Rows that were put without saying when they were touched count as touched at this version."""
        self._members.settle(version, self._directory)

    def scan(self, cursor: int, limit: int) -> tuple[RowBlock, int]:
        """The next block of rows from `cursor` (first 0), and the next cursor; an empty block ends it."""
        ids, positions, cursor = self._directory.scan(cursor, limit)
        return RowBlock(ids, *self._rows.block(positions), self._members.touches(positions)), cursor

    def stored(self, ids: Int64) -> RowBlock:
        """Of `ids` int64 `[n]` the rows that hold a value of their own, in that order."""
        positions = np.empty(len(ids), np.int64)
        if self._directory.find(ids, positions):
            live = positions >= 0
            ids, positions = ids[live], positions[live]
        return RowBlock(ids, *self._rows.block(positions), self._members.touches(positions))

    def delete(self, ids: Int64) -> int:
        """Takes the rows of `ids` int64 `[n]` away; returns how many there were."""
        self._save_of(ids)
        self._members.forget(ids, self._directory)
        removed = self._directory.remove(ids)
        self._deleted += removed
        return removed

    def statistics(self) -> TableStatistics:
        """As in `EmbeddingStore.table_statistics`; bytes of the address space that rows have come to use."""
        row_bytes = self._row_bytes + self._members.row_bytes
        held = self._directory.bytes + self._members.bytes + self._directory.positions_given * row_bytes
        gone = self._members.evicted, self._deleted
        return TableStatistics(self.count, held, self._members.refused, *gone, self._written)

    def state(self) -> TableState:
        """What the table keeps besides its rows."""
        return TableState(
            self._members.admission_counts(), None if self.following is None else self.following.untouched_decay()
        )

    def put_state(self, state: TableState) -> None:
        """Restores what `state` returned. Raises `BadInput`, and nothing has changed."""
        counts, decay = state.admission_counts, state.untouched_decay
        if counts is not None:
            self._members.require_admission_counts(counts)
        if decay is not None and self.following is None:
            raise BadInput(f"table {self.spec.name!r} has lazy=True, so there is no decay of other rows to restore")
        if decay is not None and self.following is not None:
            self.following.require_decay(decay)
            self.following.steps.put_untouched(decay)
        if counts is not None:
            self.versions.save_admission_counts(self._members)
            self._members.put_admission_counts(counts)

    def clear(self) -> None:
        """Deletes every row and count, and frees their memory."""
        self._written += 1 + self.count
        self._rows.close()
        if self.following is not None:
            self.following.begin_anew()
        self._directory, self._rows = self._empty(self.spec)
        self._members = RowMembership(self.spec, self._directory.capacity, self._new_slab)

    def close(self) -> None:
        """Gives back what is not memory."""
        self._rows.close()

    def _write_initial(self, ids: Int64, places: Int64, out: Float32) -> None:
        """As in `TableReader._write_initial`."""
        super()._write_initial(ids, places, out)
        scale_rows(out, places, self._rows.untouched)

    def _save(self, staged: StagedUpdate, fresh: Int64, pool: RangePool) -> None:
        """Before rows of an update are changed; those at `fresh` are new."""
        positions = staged.batch.positions
        if len(fresh):
            positions = positions.copy()
            positions[fresh] = -1
        self.versions.save(staged.batch.ids, positions, self._rows, self._members, pool)
        if staged.sighted is not None and len(staged.sighted):
            self.versions.save_admission_counts(self._members)

    def _save_of(self, ids: Int64) -> None:
        """Before rows of `ids` int64 `[n]`, which may repeat, are changed."""
        if self.versions:
            once, positions = np.unique(ids), np.empty(len(ids), np.int64)
            self._directory.find(once, positions[: len(once)])
            self.versions.save(once, positions[: len(once)], self._rows, self._members, SERIAL)

    def _save_unsettled(self) -> None:
        """Before rows that were put without a version get this one."""
        ids = self._members.unsettled(self._directory)
        if ids is not None:
            self._save_of(ids)

    def _remove(self, ids: Int64) -> int:
        """Rows of `ids` int64 `[n]` are evicted; returns how many there were."""
        self._save_of(ids)
        return self._directory.remove(ids)

    def _empty(self, spec: TableSpec) -> tuple[RowDirectory, TableRows]:
        new_slab = self._new_slab
        directory = IdIndex(new_slab) if self._direct is None else DirectRows(self._direct, new_slab)
        return directory, self._make_rows(spec, self.optimizer, directory.capacity)

    def _reserve(self, ids: Int64) -> None:
        """Room for the rows of `ids`, whether they have one or not; nothing has changed when it fails."""
        self._directory.reserve(len(ids))
        self._rows.grow(self._directory.capacity)
        self._members.grow(self._directory.capacity)
        self._rows.allocate(self._directory.places(ids))

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
