"""Which ids of a table have rows: who is admitted, who was touched when, and who is evicted."""

import logging
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Int64, UInt8, UInt32
from elastable.embedding_store.contract.row_data import (
    NEXT_VERSION,
    Commit,
    EvictionCut,
    StayingRows,
    TableState,
    TableUpdate,
)
from elastable.embedding_store.contract.spec import AdmissionSpec, TableSpec
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.kernel import kernel, prefetch
from elastable.embedding_store.native.number_formats import mixed_bits
from elastable.embedding_store.native.row_directory import RowDirectory
from elastable.embedding_store.native.slab import Slab, SlabMaker, anonymous_slab
from elastable.embedding_store.tables.initial_values import table_key, whole_ids

_LOG = logging.getLogger(__name__)

_NO_ROW = -1
_NO_TIE = -2
_CHUNK = 1 << 12  # rows that go at a time
_DIGIT_BITS = 11


class RowMembership:
    """The admission and eviction of one table; where its spec has none, everyone comes and stays.

    With eviction it keeps by position the version that last touched a row, and where frequency counts, how often it was
    touched. Positions are there once in every call.

    Attributes:
        refused: Gradients dropped so far, as their ids were not admitted yet.
        evicted: Rows evicted so far.
        has_unsettled: Whether rows may have been put without a version.
    """

    def __init__(self, spec: TableSpec, rows: int, new_slab: SlabMaker = anonymous_slab) -> None:
        """Room for `rows` rows. Raises `MemoryError`."""
        self._table, self._origin, self._eviction = spec.name, spec.origin, spec.eviction
        self._sketch = None if spec.admission is None else AdmissionSketch(spec, spec.admission, new_slab)
        self._versions: Slab | None = None
        self._frequencies: Slab | None = None  # without its rule nobody asks how often
        self._times: TouchTimes | None = None
        if spec.eviction is not None:
            self._versions = new_slab("touched", rows, 1, np.int64)
            if spec.eviction.min_frequency is not None:
                self._frequencies = new_slab("frequency", rows, 1, np.uint32)
            if spec.eviction.ttl is not None:
                self._times = TouchTimes(spec.name, spec.eviction.ttl)
            self._tally = np.zeros(1 << _DIGIT_BITS, np.int64)
            self._doomed, self._doomed_ids = np.empty(_CHUNK, np.int64), np.empty(_CHUNK, np.int64)
        self.refused = self.evicted = 0
        self.has_unsettled = False

    @property
    def row_bytes(self) -> int:
        """Bytes that this takes of each row."""
        return (0 if self._versions is None else 8) + (0 if self._frequencies is None else 4)

    @property
    def bytes(self) -> int:
        """Bytes that this takes whatever the number of rows."""
        return 0 if self._sketch is None else self._sketch.bytes

    def grow(self, rows: int) -> None:
        """Makes room for `rows` rows. Raises `MemoryError`, and nothing has changed."""
        for slab in (self._versions, self._frequencies):
            if slab is not None:
                slab.grow(rows)

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
        strangers = np.flatnonzero(directory.positions_of(update.ids) < 0)
        if not len(strangers):
            return update, None
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

    # When rows were touched

    def touch(self, positions: Int64, fresh: Int64, version: int) -> None:
        """Rows at `positions` int64 `[n]` are touched once more; those at `positions[fresh]` for the first time."""
        if self._versions is not None:
            self._versions.array[positions, 0] = version
        if self._frequencies is not None:
            self._frequencies.array[positions[fresh], 0] = 0
            _once_more(self._frequencies.array[:, 0], positions)

    def touches(self, positions: Int64) -> Int64 | None:
        """`RowBlock.touches` of the rows at `positions` int64 `[n]`; frequencies that nobody counts are 0."""
        if self._versions is None:
            return None
        touches = np.zeros((len(positions), 2), np.int64)
        touches[:, 0] = self._versions.array[positions, 0]
        if self._frequencies is not None:
            touches[:, 1] = self._frequencies.array[positions, 0]
        return touches

    def put(self, positions: Int64, touches: Int64 | None) -> None:
        """What `touches` gave, of rows that are put at `positions` int64 `[n]`; None: touched once, at the version that
        is committed next."""
        if self._versions is None:
            return
        self._versions.array[positions, 0] = NEXT_VERSION if touches is None else touches[:, 0]
        if self._frequencies is not None:
            self._frequencies.array[positions, 0] = 1 if touches is None else touches[:, 1]
        self.has_unsettled |= touches is None or bool((touches[:, 0] == NEXT_VERSION).any())

    def forget(self, ids: Int64, directory: RowDirectory) -> None:
        """The rows of `ids` int64 `[n]` are about to be taken away by hand."""
        if self._versions is not None:
            positions = directory.positions_of(ids)
            self._versions.array[positions[positions >= 0], 0] = _NO_ROW

    def unsettled(self, directory: RowDirectory) -> Int64 | None:
        """int64: ids of rows that were put without a version, which the next eviction gives them; None: there are
        none."""
        if self._versions is None or not self.has_unsettled:
            return None
        waiting: Int64 = np.flatnonzero(self._versions.array[: directory.positions_given, 0] == NEXT_VERSION)
        return directory.row_ids[waiting]

    def frequencies(self, high: int) -> UInt32 | None:
        """uint32 `[high]`, a copy of how often the rows below position `high` were touched; None: nobody counts."""
        return None if self._frequencies is None else self._frequencies.array[:high, 0].copy()

    def counts_anew(self, version: int) -> bool:
        """Whether `evict` at this version begins to count anew how often rows are touched."""
        return self._eviction is not None and self._frequencies is not None and not version % self._eviction.every

    # Who goes

    def staying(self, version: int, update: TableUpdate | None, directory: RowDirectory, time: float) -> StayingRows:
        """The rows that `evict` would leave after this update but for `max_rows`; changes nothing."""
        assert self._eviction is not None, "a table with a budget of rows has eviction"
        assert self._versions is not None
        ids = np.empty(0, np.int64) if update is None else self.screen(update, directory)[0].ids
        positions = directory.positions_of(ids)
        touched, fresh_ids = positions[positions >= 0], ids[positions < 0]
        oldest = 0 if self._times is None else self._times.oldest_at(version, time)
        row_ids, least_times = directory.row_ids, self._eviction.min_frequency or 0
        versions = self._versions.array[: len(row_ids), 0].copy()
        versions[versions == NEXT_VERSION] = version
        versions[touched] = version
        stays = versions >= max(0, self._oldest(version, oldest))
        if self._frequencies is not None and least_times:
            times = self._frequencies.array[: len(row_ids), 0].astype(np.int64)
            times[touched] += 1
            stays &= times >= least_times
            fresh_ids = fresh_ids[: None if least_times == 1 else 0]
        together = np.full(len(fresh_ids), version, np.int64)
        rows = np.concatenate([row_ids[stays], fresh_ids])
        whole = rows * self._origin.id_stride + self._origin.id_offset
        return StayingRows(np.concatenate([versions[stays], together]), whole)

    def _oldest(self, version: int, oldest: int) -> int:
        age = None if self._eviction is None else self._eviction.max_age
        return oldest if age is None else max(oldest, version - age)

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
            remove: Takes rows away by their ids, and returns how many there were; is called with a few at a time, whose
                touches are there until then.
            time: When the version is committed, as of `Commit`; None only where rows do not go with time.
            cut: As of `Commit`, where the table shares its budget of rows.
        """
        rule, slab = self._eviction, self._versions
        if rule is None or slab is None:
            return
        self._settle(slab, version, directory, time)
        if version % rule.every:
            return
        row_ids, count = directory.row_ids, directory.count
        oldest = self._oldest(version, 0 if self._times is None else self._times.oldest)
        versions = slab.array[: len(row_ids), 0]
        gone = self._let_go(versions, row_ids, (oldest, _NO_TIE, 0, rule.min_frequency or 0), remove)
        if cut is not None:
            least, tied = self._own_id(cut.least_id), _NO_TIE if cut.least_id is None else cut.version
            gone += self._let_go(versions, row_ids, (cut.version, tied, least or 0, 0), remove)
        elif rule.max_rows is not None and count - gone > rule.max_rows:
            found, of_it = _nth_oldest(versions, count - gone - rule.max_rows, self._tally)
            least_id = _nth_greatest_id(versions, row_ids, int(found), of_it, self._tally)
            gone += self._let_go(versions, row_ids, (int(found), int(found), int(least_id), 0), remove)
        self._count_anew(len(row_ids))
        self.evicted += gone

    def end_eviction(self, version: int, directory: RowDirectory, time: float | None = None) -> None:
        """What `evict` does at this version besides taking rows away."""
        if self._versions is not None:
            self._settle(self._versions, version, directory, time)
            if self.counts_anew(version):
                self._count_anew(len(directory.row_ids))

    def _settle(self, slab: Slab, version: int, directory: RowDirectory, time: float | None) -> None:
        """Rows that were put without a version have this one now."""
        if self.has_unsettled:
            versions = slab.array[: directory.capacity, 0]
            versions[versions == NEXT_VERSION] = version
            self.has_unsettled = False
        if self._times is not None and time is not None:
            self._times.note(version, time)

    def _count_anew(self, high: int) -> None:
        if self._frequencies is not None:
            self._frequencies.array[:high] = 0

    def _let_go(
        self, versions: Int64, row_ids: Int64, rule: tuple[int, int, int, int], remove: Callable[[Int64], int]
    ) -> int:
        """`rule`: as of `_doomed`. Returns how many rows went."""
        times = _NO_TIMES if self._frequencies is None else self._frequencies.array[: len(row_ids), 0]
        gone = position = 0
        while position < len(row_ids):
            found, position = _doomed(versions, times, row_ids, position, rule, self._doomed)
            doomed, ids = self._doomed[:found], self._doomed_ids[:found]
            np.take(row_ids, doomed, out=ids, mode="clip")
            gone += remove(ids)
            versions[doomed] = _NO_ROW
        return gone

    def _own_id(self, whole: int | None) -> int | None:
        """The least id here that is at least this id of the whole table."""
        return None if whole is None else -((self._origin.id_offset - whole) // self._origin.id_stride)

    # What is kept of it

    def touch_times(self) -> Int64 | None:
        """`TableState.touch_times`, a copy."""
        return None if self._times is None else self._times.read()

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


_NO_TIMES: UInt32 = np.empty(0, np.uint32)


@kernel
def _once_more(times: UInt32, positions: Int64) -> None:
    for position in positions:
        if times[position] < np.uint32(0xFFFFFFFF):
            times[position] += np.uint32(1)


@kernel
def _doomed(
    versions: Int64, times: UInt32, row_ids: Int64, position: int, rule: tuple[int, int, int, int], doomed: Int64
) -> tuple[int, int]:
    """Positions of rows that go, from `position` on, until `doomed` is full; their number, and the next position.

    Rows go that were last touched before version `oldest`, or at version `tied` with an id of `least_id` or above, or
    fewer than `least_times` times.
    """
    oldest, tied, least_id, least_times = rule
    count = 0
    while position < len(versions) and count < len(doomed):
        version = versions[position]
        goes = version < oldest or (version == tied and row_ids[position] >= least_id)
        if least_times > 0 and times[position] < least_times:
            goes = True
        if goes and version >= 0:
            doomed[count] = position
            count += 1
        position += 1
    return count, position


@kernel
def _nth_oldest(versions: Int64, n: int, tally: Int64) -> tuple[np.int64, int]:
    """The version of the n-th oldest row, from 1, and how many of the rows of that version are among the n oldest."""
    found = np.int64(0)
    for shift in range(55, -1, -11):
        tally[:] = 0
        for version in versions:
            if version >= 0 and (shift == 55 or (version >> (shift + 11)) == (found >> (shift + 11))):
                tally[(version >> shift) & 2047] += 1
        digit = 0
        while tally[digit] < n:
            n -= tally[digit]
            digit += 1
        found |= np.int64(digit) << shift
    return found, n


@kernel
def _nth_greatest_id(versions: Int64, row_ids: Int64, tied: int, n: int, tally: Int64) -> np.int64:
    """The n-th greatest id, from 1, of the rows last touched at version `tied`."""
    flip = np.uint64(1) << np.uint64(63)  # as unsigned numbers, negative ids would come last
    found = np.uint64(0)
    for shift in range(55, -1, -11):
        tally[:] = 0
        for i in range(len(versions)):
            if versions[i] == tied:
                key = np.uint64(row_ids[i]) ^ flip
                if shift == 55 or (key >> np.uint64(shift + 11)) == (found >> np.uint64(shift + 11)):
                    tally[np.int64((key >> np.uint64(shift)) & np.uint64(2047))] += 1
        digit = 2047
        while tally[digit] < n:
            n -= tally[digit]
            digit -= 1
        found |= np.uint64(digit) << np.uint64(shift)
    return np.int64(found ^ flip)


_SPANS = 1024  # into which the time that rows may stay is divided
_MOST_SPANS = _SPANS + 8
_MOST_MS = 1 << 62
_BEHIND_MS = 5_000  # by which clocks of two processes may differ without a word

_Span = tuple[int, int, int]
"""The last of some consecutive versions, and when the first and the last of them were committed, in milliseconds."""


class TouchTimes:
    """Times of versions. Rows keep the version that touched them, and no time: this says which versions are too old.

    Versions that were committed within a 1024th of `ttl` count as committed with the last of them, so that it takes
    some kilobytes whatever the pace of commits. A row therefore goes that much too late at most, and never too early.
    """

    def __init__(self, table: str, ttl: float) -> None:
        """`ttl`: seconds that rows may stay untouched."""
        self._table = table
        self._ttl_ms = max(1, round(1000 * ttl))
        self._span_ms = -(-self._ttl_ms // _SPANS)
        self._spans: list[_Span] = []  # the oldest first; of those that are too old, one
        self._behind = False  # whether it was reported that the clock is

    def note(self, version: int, time: float) -> None:
        """A version is committed at a time, in seconds since 1970; where the clock went back, when the last was.

        Later versions are no more: the store was reset to an earlier one.
        """
        now = int(1000 * time)
        if self._spans:
            self._report(self._spans[-1][2] - now)
            now = max(now, self._spans[-1][2])
        self._forget_from(version)
        if self._spans:
            _, began, _ = self._spans[-1]
            if now - began < self._span_ms:
                self._spans[-1] = version, began, now
                return
        self._spans.append((version, now, now))
        while len(self._spans) > 1 and self._spans[1][2] < now - self._ttl_ms:
            del self._spans[0]

    def _report(self, behind_ms: int) -> None:
        """Says once that time stands still, since a process whose clock was ahead has made a version."""
        if behind_ms >= _BEHIND_MS and not self._behind:
            _LOG.warning(
                "table %r: its last version is %.0f s ahead of the clock here; until that is reached, no row is older",
                self._table,
                behind_ms / 1000,
            )
        self._behind = behind_ms >= _BEHIND_MS

    def _forget_from(self, version: int) -> None:
        while self._spans and self._spans[-1][0] >= version:
            _, began, last = self._spans.pop()
            before = self._spans[-1][0] if self._spans else 0
            if before < version - 1:
                self._spans.append((version - 1, began, last))

    @property
    def oldest(self) -> int:
        """Rows that no version from this one on has touched, were last touched more than `ttl` seconds ago."""
        gone = [version for version, _, last in self._spans if last < self._spans[-1][2] - self._ttl_ms]
        return gone[-1] + 1 if gone else 0

    def oldest_at(self, version: int, time: float) -> int:
        """What `oldest` would be, were a version committed at a time; notes nothing."""
        then = TouchTimes(self._table, self._ttl_ms / 1000)
        then._spans, then._behind = self._spans.copy(), True
        then.note(version, time)
        return then.oldest

    def read(self) -> Int64:
        """`TableState.touch_times`, a copy."""
        return np.array(self._spans, np.int64).reshape(-1, 3)

    def write(self, times: Int64) -> None:
        """Restores what `read` returned, of what `require` takes."""
        self._spans = [(int(version), int(began), int(last)) for version, began, last in times]

    def require(self, times: Int64) -> None:
        """Raises `BadInput` for what no `read` returns."""
        if not isinstance(times, np.ndarray) or times.dtype != np.int64 or times.shape != (len(times), 3):
            got = f"{times.dtype} {list(times.shape)}" if isinstance(times, np.ndarray) else type(times)
            raise BadInput(f"table {self._table!r}: touch times must be int64 [spans, 3], got {got}")
        versions, spans = times[:, 0], times[:, 1:].reshape(-1)
        ordered = bool((np.diff(versions) > 0).all() and (np.diff(spans) >= 0).all())
        bounded = len(times) <= _MOST_SPANS and not ((times < 0) | (times > _MOST_MS)).any()
        if not (ordered and bounded):
            raise BadInput(
                f"table {self._table!r}: touch times must be at most {_MOST_SPANS} rows of a version and two times, "
                "none negative and in ascending order"
            )


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
