"""A table in memory as it was at a pinned version: before-images first, then the current rows."""

from collections.abc import Sequence

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import RowBlock, TableState
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.before_images import BeforeImages, ImageRows
from elastable.embedding_store.engine.dense_replay import DenseReplay
from elastable.embedding_store.engine.membership import RowMembership
from elastable.embedding_store.engine.table_rows import TableRows
from elastable.embedding_store.native.row_directory import RowDirectory
from elastable.embedding_store.native.row_gather import scale_rows
from elastable.embedding_store.tables.table_reader import TableReader

_PLACE_BITS = 40  # positions and places have fewer
_PLACE = (1 << _PLACE_BITS) - 1
_NEVER = 1 << 62


class PinnedTable(TableReader):
    """One version of a table. Good as long as its store's lock is held.

    A place is a position in the table, or an image's number and, above
    `_PLACE_BITS`, 1 + the number of the images among `since`.

    Args:
        spec: The table.
        directory, rows, members: Of the table as it is now.
        since: What was saved for the version, for the next one that is pinned, and so on.
        sequence: Changes of rows so far of which images were taken.
        replay: Of a table whose rows follow steps.
    """

    def __init__(
        self,
        spec: TableSpec,
        directory: RowDirectory,
        rows: TableRows,
        members: RowMembership,
        since: Sequence[BeforeImages],
        sequence: int,
        replay: DenseReplay | None = None,
    ) -> None:
        self.sequence = sequence
        self._replay = replay
        self._since = since
        self._current, self._current_rows, self._members = directory, rows, members
        self._images = [(number, of.memory) for number, of in enumerate(since, 1) if of.memory is not None]
        found, read = _Places(directory, self._images), _Rows(rows, self._images)
        super().__init__(spec, found if self._images else directory, read if self._images else rows)

    @property
    def count(self) -> int:
        """Rows that held a value of their own."""
        return self._since[0].count

    def state(self) -> TableState:
        """What the table kept besides its rows."""
        kept = next((images.admission_counts for images in self._since if images.admission_counts is not None), None)
        counts = self._members.admission_counts() if kept is None else kept.copy()
        decay = None if self._replay is None else self._replay.untouched_decay(self._since[0].step)
        times = next((images.touch_times for images in self._since if images.touch_times is not None), None)
        return TableState(counts, decay, self._members.touch_times() if times is None else times.copy())

    def stored(self, ids: Int64) -> RowBlock:
        """Of `ids` int64 `[n]` the rows that held a value of their own, in that order."""
        places = np.empty(len(ids), np.int64)
        if self.directory.find(ids, places):
            live = places >= 0
            ids, places = ids[live], places[live]
        weights, slots = self._current_block(np.where(places >> _PLACE_BITS == 0, places, -1))
        for number, images in self._images:
            of = np.flatnonzero(places >> _PLACE_BITS == number)
            if len(of):
                some = places[of] & _PLACE
                weights[of], slots[of] = self._current_rows.seen(*images.block(some))
        return RowBlock(ids, weights, slots, self._touches(places), trained=True)

    def unchanged(self, cursor: int, limit: int) -> tuple[RowBlock | None, int]:
        """Of the next up to `limit` current rows, those that have not changed since the version.

        Args:
            cursor: 0 at first, then what was returned last.
            limit: At least 1.

        Returns:
            The rows, None at the end; and the next cursor, which is above the positions of all rows so far.
        """
        ids, positions, cursor = self._current.scan(cursor, limit)
        if not len(ids):
            return None, cursor
        places = np.empty(len(ids), np.int64)
        for _, images in self._images:
            if images.find(ids, places) < len(ids):
                same = places < 0
                ids, positions, places = ids[same], positions[same], places[same]
        return RowBlock(ids, *self._current_rows.block(positions), self._touches(positions), trained=True), cursor

    def changed(self, ends: Sequence[int], sequences: Sequence[int]) -> Int64:
        """int64: ids of rows that have changed since the version, but for those that `unchanged` gave before.

        Args:
            ends: The cursors that `unchanged` returned, ascending.
            sequences: What `sequence` was, each time.
        """
        read_at = np.array([*sequences, _NEVER], np.int64)
        found = [read_at[:0]]
        for number, (_, images) in enumerate(self._images):
            ids, positions = images.ids, images.positions
            # A row lay there until its first change, which came before or after that place was read.
            given = read_at[np.searchsorted(np.asarray(ends, np.int64), positions, side="right")] < images.sequences
            chosen = np.flatnonzero((positions >= 0) & ~given)
            ids = ids[chosen]
            for _, older in self._images[:number]:
                places = np.empty(len(ids), np.int64)
                if older.find(ids, places) < len(ids):
                    ids = ids[places < 0]
            found.append(ids)
        return np.concatenate(found)

    def _write_initial(self, ids: Int64, places: Int64, out: Float32) -> None:
        super()._write_initial(ids, places, out)
        scale_rows(out, places, self._current_rows.untouched)

    def _current_block(self, positions: Int64) -> tuple[Float32, Float32]:
        """Current rows at `positions` int64 `[n]`; anything where they are negative."""
        live = np.flatnonzero(positions >= 0)
        if len(live) == len(positions):
            return self._current_rows.block(positions)
        some, some_slots = self._current_rows.block(positions[live])
        weights = np.empty((len(positions), self.spec.dim), np.float32)
        slots = np.empty((len(positions), some_slots.shape[1]), np.float32)
        weights[live], slots[live] = some, some_slots
        return weights, slots

    def _touches(self, places: Int64) -> Int64 | None:
        """`RowBlock.touches` of the rows at places int64 `[n]`."""
        if self.spec.eviction is None:
            return None
        touches = np.zeros((len(places), 2), np.int64)
        of = places >> _PLACE_BITS
        here = np.flatnonzero(of == 0)
        positions, sequences = places.copy(), np.full(len(places), self.sequence + 1)
        current = self._members.touches(places[here])
        assert current is not None
        touches[here] = current
        for number, images in self._images:
            there = np.flatnonzero(of == number)
            some = places[there] & _PLACE
            if len(there):
                touches[there] = images.touched.array[some]
                positions[there], sequences[there] = images.positions[some], images.sequences[some]
        # The first count that ended after the version, and before the row was saved, is the one that it was in.
        for since in reversed(self._since):
            if since.frequencies is not None:
                ended, frequencies = since.frequencies
                counted = np.flatnonzero(sequences > ended)
                touches[counted, 1] = frequencies[positions[counted]]
        return touches


class _Places:
    """Finds where rows of a version are."""

    def __init__(self, directory: RowDirectory, images: Sequence[tuple[int, ImageRows]]) -> None:
        self._directory, self._images = directory, images
        self.marks = None
        self.count = directory.count

    def find(self, ids: Int64, places: Int64) -> int:
        self._directory.find(ids, places)
        found = np.empty(len(ids), np.int64)
        for number, images in reversed(self._images):  # what an older version has saved counts in the end
            if images.find(ids, found) < len(ids):
                saved = np.flatnonzero(found >= 0)
                images_of = found[saved]
                places[saved] = images_of | (number << _PLACE_BITS)
                if images.tells_of_none:
                    places[saved[images.positions[images_of] < 0]] = -1
        return int(np.count_nonzero(places < 0))


class _Rows:
    """Reads rows at places."""

    def __init__(self, rows: TableRows, images: Sequence[tuple[int, ImageRows]]) -> None:
        self._rows, self._images = rows, images
        self.plain = None

    def read(self, places: Int64, out: Float32, stream: bool = False) -> None:
        of = places >> _PLACE_BITS
        self._rows.read(np.where(of == 0, places, -1), out, stream)
        for number, images in self._images:
            if self._rows.follows:
                some = np.flatnonzero(of == number)
                out[some] = self._rows.seen(*images.block(places[some] & _PLACE))[0]
            else:
                images.read(np.where(of == number, places & _PLACE, -1), out, stream)
