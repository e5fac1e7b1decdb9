"""Which keys are hot: the directory of a cache, set-associative, that admits by frequency.

Frames come in sets of eight, whose keys fill one cache line; a key belongs to
one set. A counter of its uses stands beside every frame. A key without a frame
is counted in a sketch, and gets a frame once it has been asked for more often
than the least used key of its set (TinyLFU: Einziger, Friedman, Manes, ACM ToS
2017). So a scan of keys that come once washes nothing out. All counts are
halved now and then: what was hot once gives way.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.native.kernel import kernel, prefetch, prefetch_line
from elastable.embedding_store.native.range_pool import RangePool
from elastable.embedding_store.native.row_gather import rows_ahead
from elastable.embedding_store.native.row_moves import copy_row, drain_streams, prefetch_row, stream_row
from elastable.embedding_store.native.slab import Slab
from elastable.embedding_store.native.work_stealing import WorkCounter, join_work, leave_work, next_pieces

__all__ = ["BYTES_A_FRAME", "WAYS", "HotSet", "whole_sets"]

WAYS = 8
"""Frames in a set."""

BYTES_A_FRAME = 18
"""Bytes that a frame takes here: key, uses and mark, and at most 8 of the sketch."""

_Bytes = npt.NDArray[np.uint8]
_AHEAD = 64
_KEYS_A_TURN = 1 << 10  # what is known of them stays in the first cache from finding to copying
_MOST_USES = 15  # further uses write nothing, so that threads do not fight for a hot counter
_LIFE = 40  # keys asked for, per frame, from one halving to the next


class HotSet:
    """Keys that have a frame, and which frame.

    `find` may run from many threads at once, beside nothing else; the rest in
    one thread alone. A frame can bear a mark (its row is to be written back),
    which goes with its key.

    Attributes:
        frames: How many there are, a multiple of `WAYS`.
        marks: uint8 `[frames]`, not 0 where a frame is marked.
    """

    def __init__(self, frames: int, dense: bool) -> None:
        """A directory in which nothing has a frame.

        Args:
            frames: Wanted; `whole_sets` makes more of them.
            dense: Keys are 0, 1, 2, ... and go to the sets in turn, so that
                as many frames as keys hold them all; else any int64, hashed.
        """
        self.frames = whole_sets(frames)
        self.marks = np.zeros(self.frames, np.uint8)
        self._dense = dense
        # Slabs lie on huge pages: sets and counters are looked at all over the place.
        self._keys = Slab(self.frames // WAYS, WAYS, np.int64).array
        self._uses = Slab(self.frames, 1, np.uint8).array.reshape(-1)
        self._sketch = Slab(1 << (4 * self.frames - 1).bit_length(), 1, np.uint8).array.reshape(-1)
        self._asked = self._sighted = 0
        self.clear()

    def find(self, keys: Int64, frames: Int64, cold: Int64, counted: bool = True) -> int:
        """Where keys lie.

        Args:
            keys: int64 `[n]`; where `dense`, negative ones are passed over.
            frames: int64 `[n]`, written: the frame, or -1.
            cold: int64 `[n]`, written: indices in `keys` of those without a frame, ascending.
            counted: Whether this is a use of the keys.

        Returns:
            How many have no frame: the part of `cold` that was written.
        """
        if counted:
            self._asked += len(keys)
        return int(_find(self._keys, self._uses, self._dense, keys, frames, cold, counted))

    def read(
        self, keys: Int64, rows: Float32, out: Float32, stream: bool, pool: RangePool, counted: bool = True
    ) -> Int64:
        """Copies the rows of keys that have a frame, by all threads of a pool.

        Args:
            keys: int64 `[n]`, contiguous.
            rows: float32 `[frames, dim]`.
            out: float32 `[n, dim]`; rows of keys without a frame are left alone.
            stream: Past the caches, where `can_stream(out)`.
            counted: Whether this is a use of the keys.

        Returns:
            int64: indices in `keys` of those without a frame, ascending; where `dense`, but for negative ones.
        """
        if counted:
            self._asked += len(keys)
        chunks = -(-len(keys) // _KEYS_A_TURN)
        counter, cold, counts = WorkCounter(pool.threads), np.empty(len(keys), np.int64), np.empty(chunks, np.int64)
        ahead = rows_ahead(rows.shape[1])
        work = partial(_read_shared, self._keys, self._uses, self._dense, keys, rows, out, stream, ahead, counted,
                       cold, counts, counter.state)  # fmt: skip
        pool.together(work, counter)
        return cold[: _joined(cold, counts)]

    def admit(self, keys: Int64, frames: Int64, gone_keys: Int64, gone_frames: Int64) -> int:
        """Counts keys that have no frame as asked for, and gives frames to those hot enough.

        Args:
            keys: int64 `[n]`; may repeat.
            frames: int64 `[n]`, written: the frame of a key that got one now, else -1.
            gone_keys: int64 `[n]`, written: keys that lost a marked frame.
            gone_frames: int64 `[n]`, written: the frames of those; their marks are taken away.

        Returns:
            How many lost a marked frame.
        """
        self._sighted += len(keys)
        if self._asked > _LIFE * self.frames:
            _halve(self._uses, np.uint8(1))
            self._asked = 0
        if self._sighted > len(self._sketch):  # more would all fall on counters that others have raised
            _halve(self._sketch, np.uint8(0))
            self._sighted = 0
        gone = _admit(
            self._keys, self._uses, self.marks, self._sketch, self._dense, keys, frames, gone_keys, gone_frames
        )
        return int(gone)

    def remove(self, keys: Int64) -> None:
        """Takes frames away from keys int64 `[n]`; how hot they were is remembered."""
        _remove(self._keys, self._uses, self.marks, self._sketch, self._dense, self._vacant, keys)

    def marked(self) -> tuple[Int64, Int64]:
        """Keys int64 `[n]` and frames int64 `[n]` of marked frames; marks stay."""
        frames = np.flatnonzero(self.marks)
        return self._keys.reshape(-1)[frames], frames

    def hottest(self, most: int) -> Int64:
        """Up to `most` keys that have frames, those used most first; int64 `[n]`."""
        frames = np.argsort(self._uses, kind="stable")[::-1][:most]
        return self._keys.reshape(-1)[frames[self._uses[frames] > 0]]

    def count(self) -> int:
        """Frames that hold a key."""
        return int(np.count_nonzero(self._uses))

    def clear(self) -> None:
        """Takes every frame away, and forgets what was hot."""
        # An empty frame holds a key that belongs to another set: it is never found.
        self._vacant = 0, 1
        if not self._dense:
            home = _set_of(0, len(self._keys), False)
            other = next(key for key in range(1, 1 << 20) if _set_of(key, len(self._keys), False) != home)
            self._vacant = 0, other
            self._keys[:] = 0
            self._keys[home] = other
        else:
            self._keys[:] = -1
        for counts in (self._uses, self.marks, self._sketch):
            counts[:] = 0
        self._asked = self._sighted = 0


def whole_sets(frames: int) -> int:
    """At least so many frames as sets of eight, of which there are two or more."""
    return WAYS * max(2, -(-frames // WAYS))


@kernel
def _mixed(key: int) -> np.uint64:
    """The finalizer of splitmix64 (Steele, Lea, Flood: OOPSLA 2014)."""
    h = np.uint64(key)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


@kernel
def _set_of(key: int, sets: int, dense: bool) -> np.int64:
    if dense:
        # key modulo sets, by a multiplication in place of a division of integers: keys are below 2**52.
        rest = np.int64(key) - np.int64(np.float64(key) * (1.0 / sets)) * np.int64(sets)
        rest = rest + np.int64(sets) if rest < 0 else rest
        return rest - np.int64(sets) if rest >= sets else rest
    return np.int64(((_mixed(key) >> np.uint64(32)) * np.uint64(sets)) >> np.uint64(32))


@kernel
def _way_of(keys: Int64, home: np.int64, key: int) -> int:
    way = -1
    for k in range(WAYS):  # all of them: without a branch it runs vectorised
        way = k if keys[home, k] == key else way
    return way


@kernel
def _find(keys: Int64, uses: _Bytes, dense: bool, wanted: Int64, frames: Int64, cold: Int64, counted: bool) -> int:
    sets, count, last = len(keys), 0, len(wanted) - 1
    counters = uses.reshape(-1, WAYS)
    for i in range(len(wanted)):  # of its own: so it runs vectorised, and each set is computed once
        frames[i] = _set_of(wanted[i], sets, dense)
    for i in range(len(wanted)):
        prefetch_line(keys, frames[min(i + _AHEAD, last)], 0)
        if counted:
            prefetch_line(counters, frames[min(i + _AHEAD, last)], 0)
        key, home = wanted[i], frames[i]
        nobody = dense and key < 0
        way = -1 if nobody else _way_of(keys, home, key)
        there = way >= 0
        frame = home * WAYS + way if there else -1
        frames[i] = frame
        cold[count] = i
        count += 0 if there or nobody else 1  # without a branch: misses cannot be foreseen
        if counted and there and uses[frame] < _MOST_USES:
            uses[frame] += np.uint8(1)
    return count


@kernel
def _read_shared(
    keys: Int64,
    uses: _Bytes,
    dense: bool,
    wanted: Int64,
    rows: Float32,
    out: Float32,
    stream: bool,
    ahead: int,
    counted: bool,
    cold: Int64,
    counts: Int64,
    counter: Int64,
) -> None:
    """Keys that have no frame in chunk c are `cold[c * _KEYS_A_TURN :][: counts[c]]`, counted from its start."""
    frames = np.empty(_KEYS_A_TURN, np.int64)
    join_work(counter)
    first, last = next_pieces(counter, len(counts))
    while first < last:
        for chunk in range(first, last):
            start = chunk * _KEYS_A_TURN
            stop = min(start + _KEYS_A_TURN, len(wanted))
            counts[chunk] = _find(keys, uses, dense, wanted[start:stop], frames, cold[start:stop], counted)
            for i in range(stop - start):
                prefetch_row(rows, frames[min(i + ahead, stop - start - 1)])
                if frames[i] >= 0:
                    if stream:
                        stream_row(out, start + i, rows, frames[i])
                    else:
                        copy_row(out, start + i, rows, frames[i])
        first, last = next_pieces(counter, len(counts))
    drain_streams()
    leave_work(counter)


@kernel
def _joined(cold: Int64, counts: Int64) -> int:
    """What chunks left in `cold`, side by side at its beginning; how many they are."""
    total = 0
    for chunk in range(len(counts)):
        start = chunk * _KEYS_A_TURN
        for k in range(counts[chunk]):
            cold[total] = start + cold[start + k]
            total += 1
    return total


@kernel
def _sighted(sketch: _Bytes, key: int, at_least: np.uint8) -> np.uint8:
    """Counts a key that has no frame once more, in its two counters; its count."""
    mask = np.uint64(len(sketch) - 1)
    mixed = _mixed(~key)
    first, second = mixed & mask, (mixed >> np.uint64(32)) & mask
    count = sketch[first] if sketch[first] < sketch[second] else sketch[second]
    count = count + np.uint8(1) if count < _MOST_USES else count
    count = at_least if count < at_least else count
    sketch[first] = count if sketch[first] < count else sketch[first]
    sketch[second] = count if sketch[second] < count else sketch[second]
    return count


@kernel
def _admit(
    keys: Int64,
    uses: _Bytes,
    marks: _Bytes,
    sketch: _Bytes,
    dense: bool,
    wanted: Int64,
    frames: Int64,
    gone_keys: Int64,
    gone_frames: Int64,
) -> int:
    sets, gone = len(keys), 0
    for i in range(len(wanted)):
        prefetch(keys, _set_of(wanted[min(i + _AHEAD, len(wanted) - 1)], sets, dense))
        key = wanted[i]
        frames[i] = -1
        home = _set_of(key, sets, dense)
        way = _way_of(keys, home, key)
        if way >= 0:
            continue  # a repetition, or another thread's
        sighted = _sighted(sketch, key, np.uint8(0))
        least = 0
        for k in range(1, WAYS):
            least = k if uses[home * WAYS + k] < uses[home * WAYS + least] else least
        frame = home * WAYS + least
        if sighted <= uses[frame] + (uses[frame] > 0):
            continue
        if marks[frame]:
            gone_keys[gone], gone_frames[gone] = keys[home, least], frame
            gone += 1
            marks[frame] = 0
        keys[home, least] = key
        uses[frame] = sighted
        frames[i] = frame
    for i in range(len(wanted)):  # a later key may have taken a frame that was given a moment ago
        if frames[i] >= 0 and keys[frames[i] // WAYS, frames[i] % WAYS] != wanted[i]:
            frames[i] = -1
    return gone


@kernel
def _remove(
    keys: Int64, uses: _Bytes, marks: _Bytes, sketch: _Bytes, dense: bool, vacant: tuple[int, int], unwanted: Int64
) -> None:
    sets = len(keys)
    for i in range(len(unwanted)):
        prefetch(keys, _set_of(unwanted[min(i + _AHEAD, len(unwanted) - 1)], sets, dense))
        key = unwanted[i]
        if dense and key < 0:
            continue
        home = _set_of(key, sets, dense)
        way = _way_of(keys, home, key)
        if way < 0:
            continue
        frame = home * WAYS + way
        _sighted(sketch, key, uses[frame])
        empty = -1
        if not dense:
            empty = vacant[0] if _set_of(vacant[0], sets, dense) != home else vacant[1]
        keys[home, way] = empty
        uses[frame] = 0
        marks[frame] = 0


@kernel
def _halve(counts: _Bytes, up: np.uint8) -> None:
    """Rounds up where `up` is 1: a key that has a frame keeps a use, so one sighting of another does not oust it."""
    for i in range(len(counts)):
        counts[i] = (counts[i] + up) >> np.uint8(1)
