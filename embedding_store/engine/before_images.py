"""The pinned versions of one table: what is kept of each, and how it is read."""

from collections.abc import Callable, Sequence

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64, UInt8, UInt32
from elastable.embedding_store.contract.row_data import RowBlock, TableState
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.membership import RowMembership
from elastable.embedding_store.engine.table_rows import TableRows
from elastable.embedding_store.native.id_index import IdIndex
from elastable.embedding_store.native.range_pool import RangePool, find_all
from elastable.embedding_store.native.row_directory import RowDirectory
from elastable.embedding_store.native.row_gather import can_stream, gather, scale_rows
from elastable.embedding_store.native.slab import Slab
from elastable.embedding_store.optimizers.dense_replay.table_steps import TableSteps
from elastable.embedding_store.tables.table_reader import TableReader

_COPIED_A_THREAD = 1 << 12
_POSITION, _SEQUENCE = 0, 1


class BeforeImages:
    """What of a table has changed since a version was pinned, as it was then. Callers do the locking.

    An image is a row with its slots and touches, or that there was none. It is
    taken at the first change, and stays as long as this does.

    Attributes:
        count: Rows that the table had at that version.
        memory: Where the images lie; None: there are none.
        step: The step that rows had followed then, and oldest_step the oldest one that images may refer to, of a
            table whose rows follow steps.
        admission_counts: The table's admission sketch as it was; None: as it is now.
        touch_times: When versions were committed, of a table whose rows go with time; None: as it is now.
        frequencies: How often rows were touched, by position, before an eviction last began to count anew, and the
            number of that change in the table's sequence; None: no eviction has.
    """

    def __init__(self, new_memory: "Callable[[], ImageRows]", count: int, steps: TableSteps | None = None) -> None:
        """`new_memory`: makes room, empty, when the first image is taken; the others as the attributes."""
        self.count = count
        self.memory: ImageRows | None = None
        self.step = None if steps is None else steps.now
        self.oldest_step = None if steps is None else steps.first
        self.admission_counts: UInt8 | None = None
        self.touch_times: Int64 | None = None
        self.frequencies: tuple[int, UInt32] | None = None
        self._new_memory = new_memory

    @property
    def rows(self) -> int:
        """Images."""
        return 0 if self.memory is None else self.memory.count

    @property
    def bytes(self) -> int:
        """Bytes of memory that this takes."""
        apart = 0 if self.admission_counts is None else self.admission_counts.nbytes
        apart += 0 if self.frequencies is None else self.frequencies[1].nbytes
        return apart if self.memory is None else apart + self.memory.bytes

    def strangers(self, ids: Int64, pool: RangePool) -> Int64:
        """int64: indices of those of `ids` int64 `[n]` that have no image."""
        if self.memory is None:
            return np.arange(len(ids))
        places = np.empty(len(ids), np.int64)
        missing = find_all(self.memory.find, ids, places, pool)
        return np.flatnonzero(places < 0) if missing else places[:0]

    def add(self, ids: Int64, positions: Int64, sequence: int, rows: TableRows, touches: Int64 | None,
            pool: RangePool) -> None:  # fmt: skip
        """Takes images.

        Args:
            ids: int64 `[n]`, each once, none with an image.
            positions: int64 `[n]`, where their rows lie; -1: there is none.
            sequence: Number of the change that is about to happen.
            rows: The table's.
            touches: int64 `[n, 2]`, of tables with eviction.
            pool: Threads to work with.

        Raises:
            MemoryError: there is no room; nothing has changed.
        """
        held = self._begun()
        start, stop = held.add(ids)
        held.tells_of_none |= bool((positions < 0).any())
        held.origins.array[start:stop, _POSITION] = positions
        held.origins.array[start:stop, _SEQUENCE] = sequence
        if touches is not None:
            held.touched.array[start:stop] = touches
        weights, slots = held.weights.array[start:stop], held.slots.array[start:stop]
        stream = can_stream(weights)

        def copy(begin: int, end: int) -> None:
            rows.copy(positions[begin:end], weights[begin:end], slots[begin:end], stream)

        pool.run(copy, stop - start, _COPIED_A_THREAD)

    def take_over(self, newer: "BeforeImages") -> None:
        """Keeps what only the pin after this one has, which is gone, and what this one needs.

        Raises:
            MemoryError: there is no room; nothing has changed.
        """
        if newer.memory is not None:
            ours, theirs = self._begun(), newer.memory
            places = np.empty(theirs.count, np.int64)
            ours.find(theirs.ids, places)
            chosen = np.flatnonzero(places < 0)
            start, stop = ours.add(theirs.ids[chosen])
            for to, of in zip(ours.slabs, theirs.slabs, strict=True):
                np.take(of.array, chosen, axis=0, out=to.array[start:stop], mode="clip")
            ours.tells_of_none |= theirs.tells_of_none
        if self.admission_counts is None:
            self.admission_counts = newer.admission_counts
        if self.touch_times is None:
            self.touch_times = newer.touch_times
        if self.frequencies is None:
            self.frequencies = newer.frequencies

    def _begun(self) -> "ImageRows":
        if self.memory is None:
            self.memory = self._new_memory()
        return self.memory


_INDEX_BYTES = 33  # of a row, at most
_FIRST_BYTES = 64 << 10  # of an index of few rows


class ImageRows:
    """Rows that are added, found and all forgotten together; memory that was used once is used again.

    Attributes:
        weights, slots: float32 slabs.
        origins: int64 slab of two columns.
        touched: int64 slab of two columns, of tables with eviction; else of none.
        tells_of_none: Whether any image says that there was no row.
    """

    def __init__(self, spec: TableSpec, slot_width: int, direct: int | None) -> None:
        """`direct`: the size of a table whose ids lie below it, so that they are found without an index.

        Raises:
            MemoryError: the system refuses the address space.
        """
        self._index = IdIndex() if direct is None else _DirectPlaces(direct)
        rows = self._index.capacity
        touches = 0 if spec.eviction is None else 2
        self.weights, self.slots = Slab(rows, spec.dim), Slab(rows, slot_width)
        self.origins, self.touched = Slab(rows, 2, np.int64), Slab(rows, touches, np.int64)
        self.tells_of_none = False
        self._row_bytes = 4 * (spec.dim + slot_width) + 16 + 8 * touches
        self._highest = 0

    @property
    def count(self) -> int:
        """Rows that there are."""
        return self._index.count

    @property
    def ids(self) -> Int64:
        """int64 `[count]`. A view, to read."""
        return self._index.row_ids

    @property
    def positions(self) -> Int64:
        """int64 `[count]`: where scans of the table came upon the row; -1: there was none. A view, to read."""
        positions: Int64 = self.origins.array[: self.count, _POSITION]
        return positions

    @property
    def sequences(self) -> Int64:
        """int64 `[count]`: the number in the table's sequence of changes of the row's first one. A view, to read."""
        sequences: Int64 = self.origins.array[: self.count, _SEQUENCE]
        return sequences

    @property
    def slabs(self) -> tuple[Slab, ...]:
        """All of them."""
        return self.weights, self.slots, self.origins, self.touched

    @property
    def bytes(self) -> int:
        """Bytes of memory that this takes, also where it was used before and is not now."""
        return self._index.bytes + max(self._highest, self.count) * self._row_bytes

    def room(self, more: int) -> int:
        """Bytes that `more` further rows take at most."""
        return max(0, self.count + more - max(self._highest, self.count)) * (self._row_bytes + _INDEX_BYTES)

    def find(self, ids: Int64, places: Int64) -> int:
        """As `RowDirectory.find`."""
        return self._index.find(ids, places)

    def add(self, ids: Int64) -> tuple[int, int]:
        """Rows for `ids` int64 `[n]`, each once, which have none: the first one, and the one after the last.

        Raises:
            MemoryError: there is no room; nothing has changed.
        """
        self._index.reserve(len(ids))
        for slab in self.slabs:
            slab.grow(self._index.capacity)
        start = self.count
        self._index.claim(ids, np.empty(len(ids), np.int64))
        return start, self.count

    def read(self, places: Int64, out: Float32, stream: bool = False) -> None:
        """Weights of images into `out` float32 `[n, dim]`; rows of `out` at negative places are left alone."""
        gather(self.weights.array, places, out, stream)

    def block(self, places: Int64) -> tuple[Float32, Float32]:
        """Copies of images, as `TableRows.copy` gave them."""
        return self.weights.array[places], self.slots.array[places]

    def clear(self) -> None:
        """Forgets all rows, and keeps the memory."""
        self._highest = max(self._highest, self.count)
        self.tells_of_none = False
        self._index.clear()


class _DirectPlaces:
    """As `IdIndex`, for ids from 0 to a size, of rows that are never taken away one by one."""

    def __init__(self, size: int) -> None:
        self._places = Slab(size, 1, np.int64)  # 1 + the place; 0: none
        self._ids = Slab(512, 1, np.int64)
        self.count = 0

    @property
    def capacity(self) -> int:
        return len(self._ids.array)

    @property
    def row_ids(self) -> Int64:
        ids: Int64 = self._ids.array[: self.count, 0]
        return ids

    @property
    def bytes(self) -> int:
        return int(self._places.array.nbytes) + 8 * self.count

    def find(self, ids: Int64, places: Int64) -> int:
        np.take(self._places.array[:, 0], ids, out=places, mode="clip")
        np.subtract(places, 1, out=places)
        return int(np.count_nonzero(places < 0))

    def reserve(self, more: int) -> None:
        needed = self.count + more
        if needed > self.capacity:
            self._ids.grow(max(needed, self.capacity * 5 // 4))

    def claim(self, ids: Int64, places: Int64) -> None:
        """Places for ids that have none."""
        start, self.count = self.count, self.count + len(ids)
        self._ids.array[start : self.count, 0] = ids
        self._places.array[ids, 0] = np.arange(start + 1, self.count + 1)

    def clear(self) -> None:
        """Forgets every place; the memory is kept."""
        self._places.array[self.row_ids, 0] = 0
        self.count = 0


MakeRoom = Callable[[int], None]
"""Gives pins up, the oldest first, until so many bytes more may be taken; `MAX_BYTES` gives all of them up."""

MAX_BYTES = 1 << 62
_OVERHEAD = 65  # bytes of an image besides its row, at most


class TableVersions:
    """Before-images of one table, by pinned version. Callers do the locking.

    A row is saved for the newest pinned version, once; a version reads what was saved for it, else what was saved for
    the next one, and at last the table itself.

    Attributes:
        sequence: Counts changes of rows of which images were taken.
        pinned: Not empty where a version is pinned.
    """

    def __init__(
        self, spec: TableSpec, slot_width: int, steps: TableSteps | None = None, direct: int | None = None
    ) -> None:
        """`slot_width`: slots as rows are kept; `steps`: of a table whose rows follow them; `direct`: its size, where
        row i lies at position i.
        """
        self.sequence = 0
        self._steps = steps
        self._spec, self._slot_width, self._direct = spec, slot_width, direct
        self._spare: ImageRows | None = None  # memory that was used before, for the next version
        self._images = self.pinned = dict[int, BeforeImages]()  # oldest version first
        self._make_room: MakeRoom = lambda size: None

    def begin(self, version: int, count: int, make_room: MakeRoom) -> None:
        """The current version is pinned, newer than all that are: the table has `count` rows."""
        self._images[version] = BeforeImages(self._new_memory, count, self._steps)
        self._make_room = make_room

    def end(self, version: int) -> None:
        """Nobody needs the version any more.

        Raises:
            MemoryError: what the version before it needs cannot be kept; nothing has changed.
        """
        older = [other for other in self._images if other < version]
        if older:
            self._images[older[-1]].take_over(self._images[version])
        memory = self._images.pop(version).memory
        if memory is not None and self._spare is None:
            memory.clear()
            self._spare = memory

    def forget(self) -> None:
        """Nobody needs any version any more."""
        self._images.clear()
        self._spare = None

    def drop_spare(self) -> None:
        """Gives memory back that is kept for the next version."""
        self._spare = None

    def size(self, version: int) -> tuple[int, int]:
        """Rows and bytes that are kept for a version."""
        images = self._images.get(version)
        return (0, 0) if images is None else (images.rows, images.bytes)

    def step(self, version: int) -> int | None:
        """The step that rows of a pinned version have followed; None: rows follow none."""
        return self._images[version].step

    def oldest_step(self) -> int | None:
        """The oldest step that what is kept may refer to."""
        return min((images.oldest_step for images in self._images.values() if images.oldest_step), default=None)

    def since(self, version: int) -> list[BeforeImages]:
        """What a pinned version reads, one after the other, before the table itself."""
        return [images for other, images in self._images.items() if other >= version]

    def save(self, ids: Int64, positions: Int64, rows: TableRows, members: RowMembership, pool: RangePool) -> None:
        """Rows are about to change. Never fails: pins are given up, where there is no memory.

        Args:
            ids: int64 `[n]`, each once.
            positions: int64 `[n]`, where their rows lie; -1: there is none.
            rows: The table's.
            members: The table's.
            pool: Threads to work with.
        """
        self.sequence += 1
        try:
            images = self._newest()
            if images is None or not len(chosen := images.strangers(ids, pool)):
                return
            if len(chosen) < len(ids):
                ids, positions = ids[chosen], positions[chosen]
            self._make_room(self._room(images, len(ids)))
            if self._newest() is not images:
                return  # there is no pin any more
            touches = members.touches(positions)
            images.add(ids, positions, self.sequence, rows, touches, pool)
        except MemoryError:
            self._make_room(MAX_BYTES)

    def save_admission_counts(self, members: RowMembership) -> None:
        """The table's admission sketch is about to change. Never fails, as `save`."""
        images = self._newest()
        if images is None or images.admission_counts is not None or not members.bytes:
            return
        try:
            self._make_room(members.bytes)
            images.admission_counts = members.admission_counts()
        except MemoryError:
            self._make_room(MAX_BYTES)

    def save_touch_times(self, members: RowMembership) -> None:
        """The times of the table's versions are about to change: some kilobytes, of tables whose rows go with time."""
        images = self._newest()
        if images is not None and images.touch_times is None:
            images.touch_times = members.touch_times()

    def save_frequencies(self, members: RowMembership, high: int) -> None:
        """Touches of the rows below position `high` are about to be counted anew. Never fails."""
        images = self._newest()
        if images is None or images.frequencies is not None:
            return
        self.sequence += 1
        try:
            self._make_room(4 * high)
            frequencies = members.frequencies(high)
            images.frequencies = None if frequencies is None else (self.sequence, frequencies)
        except MemoryError:
            self._make_room(MAX_BYTES)

    def _room(self, images: BeforeImages, more: int) -> int:
        """Bytes that `more` further images take at most."""
        held = images.memory or self._spare
        if held is not None:
            return held.room(more)
        first = _FIRST_BYTES if self._direct is None else 8 * self._direct
        return first + more * (4 * (self._spec.dim + self._slot_width) + _OVERHEAD)

    def _new_memory(self) -> ImageRows:
        spare, self._spare = self._spare, None
        return spare or ImageRows(self._spec, self._slot_width, self._direct)

    def _newest(self) -> BeforeImages | None:
        return next(reversed(self._images.values()), None)


# The table as it was at a pinned version: before-images first, then the current rows


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
        decay: `TableState.untouched_decay` as of a step.
    """

    def __init__(
        self,
        spec: TableSpec,
        directory: RowDirectory,
        rows: TableRows,
        members: RowMembership,
        since: Sequence[BeforeImages],
        sequence: int,
        decay: Callable[[int | None], float | None],
    ) -> None:
        self.sequence = sequence
        self._decay = decay
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
        decay = self._decay(self._since[0].step)
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
        self.plain, self.framed = None, False

    def read(self, places: Int64, out: Float32, stream: bool = False) -> None:
        of = places >> _PLACE_BITS
        self._rows.read(np.where(of == 0, places, -1), out, stream)
        for number, images in self._images:
            if self._rows.follows:
                some = np.flatnonzero(of == number)
                out[some] = self._rows.seen(*images.block(places[some] & _PLACE))[0]
            else:
                images.read(np.where(of == number, places & _PLACE, -1), out, stream)
