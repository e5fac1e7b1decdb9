"""What one table in memory holds: a directory of its ids, its rows by position, and what it keeps besides them."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import RowBlock, TableState, TableStatistics
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.dense_replay.table_replay import dense_replay
from elastable.embedding_store.engine.membership.row_membership import RowMembership
from elastable.embedding_store.engine.pinned_table import PinnedTable
from elastable.embedding_store.engine.table_rows import MakeRows, TableRows, resident_rows
from elastable.embedding_store.engine.table_versions import TableVersions
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.id_index import IdIndex
from elastable.embedding_store.native.range_pool import SERIAL
from elastable.embedding_store.native.row_directory import DirectRows, RowDirectory
from elastable.embedding_store.native.row_gather import scale_rows
from elastable.embedding_store.native.slab import Slab, SlabMaker, anonymous_slab
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.support.scratch import Scratch
from elastable.embedding_store.tables.table_reader import TableReader

__all__ = ["TableContents"]


class TableContents(TableReader):
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
        self.replay = dense_replay(spec, self.optimizer)
        if self.replay is not None:
            self._make_rows = self.replay.rows(self._make_rows)
        self.slot_width = self.optimizer.slot_width(spec.dim)
        self._initial_slots = self.optimizer.initial_slots(spec.dim)
        kept_width = self.slot_width + (self.replay is not None)
        self._row_bytes = spec.weight_bytes + 4 * kept_width
        size = spec.vocabulary_size
        self._direct = size if size is not None and size * self._row_bytes <= direct_bytes else None
        # Of updates: they are claimed and applied one at a time.
        self._positions = Scratch(np.int64)
        self._removed: list[Int64] = []  # ids that the last eviction took
        self._image_rows, self._image_slots = Scratch(np.float32), Scratch(np.float32)
        self._deleted = self._written = 0
        super().__init__(spec, *self._empty(spec))
        self._members = self._new_members()
        steps = None if self.replay is None else self.replay.steps
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
        return PinnedTable(self.spec, *standing, since, self.versions.sequence, self.replay)

    def put(self, block: RowBlock) -> None:
        """Writes rows as they are. Raises `MemoryError` before anything is changed."""
        self._reserve(block.ids, loaded=False)
        self._save_of(block.ids)
        positions = np.empty(len(block.ids), np.int64)
        self._directory.claim(block.ids, positions)
        self._rows.write(positions, block.weights, block.slots)
        self._members.put(positions, block.touches)
        self._written += len(block.ids)

    def make_ready_to_put(self, ids: Int64) -> None:
        """Does what can fail about putting rows of `ids` int64 `[n]`, which may repeat; changes no row.

        Raises:
            MemoryError, ElastableError: there is no room, or a row that is there cannot be read.
        """
        self._reserve(ids)  # which may be left as they are, where the change cannot be logged

    def make_ready_to_delete(self, ids: Int64) -> None:
        """Does what can fail about deleting rows of `ids` int64 `[n]`, which may repeat; changes no row.

        Raises:
            ElastableError: a row that a pin needs cannot be read.
        """

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
        removed = self._take_away(ids)
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
        decay = None if self.replay is None else self.replay.untouched_decay()
        return TableState(self._members.admission_counts(), decay, self._members.touch_times())

    def put_state(self, state: TableState) -> None:
        """Restores what `state` returned. Raises `BadInput`, and nothing has changed."""
        counts, decay, times = state.admission_counts, state.untouched_decay, state.touch_times
        if times is not None:
            self._members.require_touch_times(times)
        if counts is not None:
            self._members.require_admission_counts(counts)
        if decay is not None and self.replay is None:
            raise BadInput(f"table {self.spec.name!r} has lazy=True, so there is no decay of other rows to restore")
        if decay is not None and self.replay is not None:
            self.replay.require_decay(decay)
            self.replay.steps.put_untouched(decay)
        if counts is not None:
            self.versions.save_admission_counts(self._members)
            self._members.put_admission_counts(counts)
        if times is not None:
            self.versions.save_touch_times(self._members)
            self._members.put_touch_times(times)

    @property
    def written_once_gone(self) -> int:
        """`TableStatistics.written`, once all rows are forgotten."""
        return self._written + 1 + self.count

    def follow_gone(self, written: int) -> None:
        """There was a table of this name before: what `written_once_gone` of it was."""
        self._written += written

    def clear(self) -> None:
        """Deletes every row and count, and frees their memory."""
        self._written = self.written_once_gone
        self._rows.close()
        if self.replay is not None:
            self.replay.begin_anew()
        self._directory, self._rows = self._empty(self.spec)
        self._members = self._new_members()

    def drop(self) -> None:
        """The table is gone from its store."""
        self.close()

    def close(self) -> None:
        """Gives back what is not memory."""
        self._rows.close()

    def _write_initial(self, ids: Int64, places: Int64, out: Float32) -> None:
        super()._write_initial(ids, places, out)
        scale_rows(out, places, self._rows.untouched)

    def _save_of(self, ids: Int64) -> None:
        """Before rows of `ids` int64 `[n]`, which may repeat, are changed."""
        if self.versions:
            once, positions = np.unique(ids), np.empty(len(ids), np.int64)
            self._directory.find(once, positions[: len(once)])
            self.versions.save(once, positions[: len(once)], self._rows, self._members, SERIAL)

    def _empty(self, spec: TableSpec) -> tuple[RowDirectory, TableRows]:
        new_slab = self._new_slab
        directory = IdIndex(new_slab) if self._direct is None else DirectRows(self._direct, new_slab)
        return directory, self._make_rows(spec, self.optimizer, directory.capacity)

    def _new_members(self) -> RowMembership:
        return RowMembership(self.spec, self._directory.capacity, self._new_slab)

    def _room(self, ids: Int64) -> None:
        """Room for the rows of `ids`, whether they have one or not; nothing has changed when it fails."""
        self._directory.reserve(len(ids))
        self._rows.grow(self._directory.capacity)
        self._members.grow(self._directory.capacity)

    def _reserve(self, ids: Int64, loaded: bool = True) -> None:
        """As `_room`, and takes whatever writing these rows needs. `loaded`: False where they are overwritten next."""
        self._room(ids)
        self._rows.allocate(self._directory.places(ids))

    def _take_away(self, ids: Int64) -> int:
        """The rows of `ids` int64 `[n]`, which may repeat or have none, are gone; returns how many there were."""
        return self._directory.remove(ids)
