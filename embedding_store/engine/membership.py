"""Which ids of a table have rows: who is admitted, who was touched when, and who is evicted."""

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Int64, UInt8, UInt32
from elastable.embedding_store.contract.row_data import Commit, EvictionCut, StayingRows, TableState, TableUpdate
from elastable.embedding_store.contract.spec import AdmissionSpec, TableSpec
from elastable.embedding_store.engine.eviction import RowTouches, TouchTimes
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.id_index import IdIndex
from elastable.embedding_store.native.kernel import kernel, prefetch
from elastable.embedding_store.native.number_formats import mixed_bits
from elastable.embedding_store.native.row_directory import RowDirectory
from elastable.embedding_store.native.slab import SlabMaker, anonymous_slab
from elastable.embedding_store.tables.initial_values import table_key, whole_ids


class RowMembership:
    """The admission and eviction of one table; where its spec has none, everyone comes and stays.

    Attributes:
        refused: Gradients dropped so far, as their ids were not admitted yet.
        evicted: Rows evicted so far.
    """

    def __init__(self, spec: TableSpec, rows: int, new_slab: SlabMaker = anonymous_slab) -> None:
        """Room for `rows` rows. Raises `MemoryError`."""
        self._table, self._origin = spec.name, spec.origin
        self._sketch = None if spec.admission is None else AdmissionSketch(spec, spec.admission, new_slab)
        self._touches = None if spec.eviction is None else RowTouches(spec.eviction, rows, new_slab)
        ttl = None if spec.eviction is None else spec.eviction.ttl
        self._times = None if ttl is None else TouchTimes(spec.name, ttl)
        self.refused = 0
        self.evicted = 0

    @property
    def row_bytes(self) -> int:
        """Bytes that this takes of each row."""
        return 0 if self._touches is None else self._touches.row_bytes

    @property
    def bytes(self) -> int:
        """Bytes that this takes whatever the number of rows."""
        return 0 if self._sketch is None else self._sketch.bytes

    def screen(self, update: TableUpdate, directory: RowDirectory) -> tuple[TableUpdate, Int64 | None]:
        """What of an update is of ids that have a row or may have one now; changes nothing.

        Returns:
            The update without the others, and int64 `[n]`: the ids, of those
            without a row, that this sights once more (None: nobody counts).

        Raises:
            MemoryError: no room for a smaller update.
        """
        if self._sketch is None:
            return update, None
        positions = np.empty(len(update.ids), np.int64)
        if not directory.find(update.ids, positions):
            return update, None
        strangers = np.flatnonzero(positions < 0)
        sighted = update.ids[strangers]
        refused = strangers[~self._sketch.admits(sighted)]
        if not len(refused):
            return update, sighted
        stays = np.ones(len(update.ids), np.bool_)
        stays[refused] = False
        squares = None if update.row_squares is None else update.row_squares[stays]
        return TableUpdate(update.ids[stays], update.gradients[stays], squares), sighted

    def count(self, sighted: Int64 | None, refused: int) -> None:
        """The ids that `screen` gave are sighted, and so many of them refused."""
        if self._sketch is not None and sighted is not None:
            self._sketch.count(sighted)
        self.refused += refused

    def grow(self, rows: int) -> None:
        """Makes room for `rows` rows. Raises `MemoryError`, and nothing has changed."""
        if self._touches is not None:
            self._touches.grow(rows)

    def touch(self, positions: Int64, fresh: Int64, version: int) -> None:
        """As `RowTouches.touch`."""
        if self._touches is not None:
            self._touches.touch(positions, fresh, version)

    def touches(self, positions: Int64) -> Int64 | None:
        """`RowBlock.touches` of the rows at `positions` int64 `[n]`."""
        return None if self._touches is None else self._touches.read(positions)

    def put(self, positions: Int64, touches: Int64 | None) -> None:
        """`RowBlock.touches` of rows that are put at `positions` int64 `[n]`."""
        if self._touches is not None:
            self._touches.write(positions, touches)

    def forget(self, ids: Int64, directory: RowDirectory) -> None:
        """The rows of `ids` int64 `[n]` are about to be taken away by hand."""
        if self._touches is not None:
            positions = np.empty(len(ids), np.int64)
            directory.find(ids, positions)
            self._touches.forget(positions[positions >= 0])

    def staying(self, version: int, update: TableUpdate | None, directory: RowDirectory, time: float) -> StayingRows:
        """The rows that `evict` would leave after this update but for `max_rows`; changes nothing."""
        assert self._touches is not None, "a table with a budget of rows has eviction"
        assert isinstance(directory, IdIndex), "eviction is for dynamic tables"
        ids = np.empty(0, np.int64) if update is None else self.screen(update, directory)[0].ids
        positions = np.empty(len(ids), np.int64)
        directory.find(ids, positions)
        there = positions >= 0
        oldest = 0 if self._times is None else self._times.oldest_at(version, time)
        versions, rows = self._touches.staying(version, directory.row_ids, positions[there], ids[~there], oldest)
        return StayingRows(versions, rows * self._origin.id_stride + self._origin.id_offset)

    def evict(
        self,
        version: int,
        directory: RowDirectory,
        remove: Callable[[Int64], int],
        time: float | None = None,
        cut: EvictionCut | None = None,
    ) -> None:
        """Lets go of rows as the table's eviction says; allocates nothing that grows with the table.

        Args:
            version: That is being committed.
            directory: Of the table.
            remove: Takes rows away by their ids, and returns how many there were.
            time: When the version is committed, as of `Commit`; None only where rows do not go with time.
            cut: As of `Commit`, where the table shares its budget of rows.
        """
        if self._touches is not None and isinstance(directory, IdIndex):
            self._begin_eviction(self._touches, version, directory, time)
            oldest = 0 if self._times is None else self._times.oldest
            goes = None if cut is None else (cut.version, self._own_id(cut.least_id))
            self.evicted += self._touches.evict(version, directory.row_ids, directory.count, remove, oldest, goes)

    def _own_id(self, whole: int | None) -> int | None:
        """The least id here that is at least this id of the whole table."""
        return None if whole is None else -((self._origin.id_offset - whole) // self._origin.id_stride)

    def end_eviction(self, version: int, directory: RowDirectory, time: float | None = None) -> None:
        """What `evict` does at this version besides taking rows away."""
        if self._touches is not None and isinstance(directory, IdIndex):
            self._begin_eviction(self._touches, version, directory, time)
            if self._touches.counts_anew(version):
                self._touches.count_anew(len(directory.row_ids))

    def _begin_eviction(self, touches: RowTouches, version: int, directory: RowDirectory, time: float | None) -> None:
        touches.settle(version, directory.capacity)
        if self._times is not None and time is not None:
            self._times.note(version, time)

    def touch_times(self) -> Int64 | None:
        """`TableState.touch_times`, a copy."""
        return None if self._times is None else self._times.read()

    def counts_anew(self, version: int) -> bool:
        """Whether `evict` at this version begins to count anew how often rows are touched."""
        return self._touches is not None and self._touches.counts_anew(version)

    def frequencies(self, high: int) -> UInt32 | None:
        """As `RowTouches.frequencies`."""
        return None if self._touches is None else self._touches.frequencies(high)

    @property
    def has_unsettled(self) -> bool:
        """Whether rows may have been put without a version."""
        return self._touches is not None and self._touches.unsettled

    def unsettled(self, directory: RowDirectory) -> Int64 | None:
        """int64: ids of rows that were put without a version, which `settle` gives them; None: there are none."""
        if self._touches is None or not self._touches.unsettled or not isinstance(directory, IdIndex):
            return None
        return directory.row_ids[self._touches.unsettled_positions(directory.positions_given)]

    def admission_counts(self) -> UInt8 | None:
        """`TableState.admission_counts`, a copy."""
        return None if self._sketch is None else self._sketch.read()

    def require_state(self, state: TableState) -> None:
        """Raises `BadInput` for what `put_state` cannot take."""
        if state.touch_times is not None:
            if self._times is None:
                raise BadInput(f"table {self._table!r}: rows do not go with time, so there are no touch times to put")
            self._times.require(state.touch_times)
        if state.admission_counts is not None:
            if self._sketch is None:
                raise BadInput(f"table {self._table!r} has no admission, so there are no admission counts to restore")
            self._sketch.require(state.admission_counts)

    def put_state(self, state: TableState) -> None:
        """Restores admission counts and touch times, of what `require_state` takes."""
        if self._times is not None and state.touch_times is not None:
            self._times.write(state.touch_times)
        if self._sketch is not None and state.admission_counts is not None:
            self._sketch.write(state.admission_counts)


_PLACES = 4
_AHEAD = 8
_MOST = 255  # that a counter counts


class AdmissionSketch:
    """A count-min sketch with conservative update (Estan, Varghese: SIGCOMM 2002) in counters of one byte.

    Each id has four counters; its count is the smallest, and counting raises only the smallest. A count is therefore
    never too small, and too large only if all four counters are shared with more frequent ids.

    Ids of a shard are counted by their ids in the whole table, so that the sketches of shards can be joined by taking
    the larger counter of each pair.
    """

    def __init__(self, table: TableSpec, admission: AdmissionSpec, new_slab: SlabMaker = anonymous_slab) -> None:
        """All counts are 0. Raises `MemoryError`."""
        low, high = table_key(table.seed, table.name)
        self._key = np.uint64(low) | np.uint64(high) << np.uint64(32)
        self._table = table.name
        self._origin = table.origin
        self._admitted_at = admission.sightings
        self._counters = new_slab("admission_counts", 1 << (admission.counters - 1).bit_length(), 1, np.uint8)

    @property
    def bytes(self) -> int:
        """Bytes of memory, one a counter."""
        return len(self._counters.array)

    def admits(self, ids: Int64) -> npt.NDArray[np.bool_]:
        """bool `[n]`: whether each of `ids` int64 `[n]` is admitted when it is seen once more."""
        counts = np.empty(len(ids), np.uint8)
        _counts(self._counters.array, self._key, whole_ids(self._origin, ids), counts)
        admitted: npt.NDArray[np.bool_] = counts >= self._admitted_at - 1
        return admitted

    def count(self, ids: Int64) -> None:
        """Counts each of `ids` int64 `[n]` once."""
        _count(self._counters.array, self._key, whole_ids(self._origin, ids))

    def read(self) -> UInt8:
        """uint8 `[counters]`, a copy."""
        return self._counters.array[:, 0].copy()

    def write(self, counters: UInt8) -> None:
        """Restores what `read` returned."""
        self._counters.array[:, 0] = counters

    def require(self, counters: UInt8) -> None:
        """Raises `BadInput` unless `counters` has the size and dtype of `read`."""
        size = len(self._counters.array)
        if not isinstance(counters, np.ndarray) or counters.dtype != np.uint8 or counters.shape != (size,):
            got = f"{counters.dtype} {list(counters.shape)}" if isinstance(counters, np.ndarray) else type(counters)
            raise BadInput(f"table {self._table!r}: admission counts must be uint8 [{size}], got {got}")


@kernel
def _first_and_step(wanted: int, key: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Where the counters of an id begin, and how far they lie apart: splitmix64's finalizer, halved."""
    h = mixed_bits(np.uint64(wanted) ^ key)
    return h, (h >> np.uint64(32)) | np.uint64(1)


@kernel
def _counts(counters: UInt8, key: np.uint64, ids: Int64, counts: UInt8) -> None:
    mask = np.uint64(len(counters) - 1)
    for i in range(len(ids)):
        place, step = _first_and_step(ids[min(i + _AHEAD, len(ids) - 1)], key)
        for _ in range(_PLACES):
            prefetch(counters, place & mask)
            place += step
        place, step = _first_and_step(ids[i], key)
        least = np.uint8(_MOST)
        for _ in range(_PLACES):
            least = min(least, counters[place & mask, 0])
            place += step
        counts[i] = least


@kernel
def _count(counters: UInt8, key: np.uint64, ids: Int64) -> None:
    mask = np.uint64(len(counters) - 1)
    for i in range(len(ids)):
        first, step = _first_and_step(ids[i], key)
        place, least = first, np.uint8(_MOST)
        for _ in range(_PLACES):
            least = min(least, counters[place & mask, 0])
            place += step
        if least == _MOST:
            continue
        place = first
        for _ in range(_PLACES):
            if counters[place & mask, 0] == least:
                counters[place & mask, 0] = least + np.uint8(1)
            place += step


# Tables that share a budget of rows (`max_rows`) with other stores: others decide what goes of them


def budgets_due(specs: Iterable[TableSpec], commit: Commit) -> set[str]:
    """Names of the tables of which others decide what goes for a budget in this commit."""
    return {spec.name for spec in specs if spec.name not in commit.frozen and spec.shares_budget(commit.version)}


def require_cuts(specs: Iterable[TableSpec], commit: Commit) -> None:
    """Raises `BadInput` unless a commit says what goes of exactly those tables whose budget is shared."""
    due = budgets_due(specs, commit)
    if due != set(commit.cuts):
        said, asked = (", ".join(sorted(names)) or "none" for names in (set(commit.cuts), due))
        raise BadInput(
            f"the commit of version {commit.version} says what goes for the max_rows of all shards of tables {said}, "
            f"and has to say so of {asked}: such tables are committed to through all of their store servers (--stores)"
        )
