"""The kernels of a hot set: finding, reading, admitting and removing keys."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.native.kernel import kernel, prefetch, prefetch_line
from elastable.embedding_store.native.numbers.number_bits import mixed_bits
from elastable.embedding_store.native.row_moves import copy_row, drain_streams, prefetch_row, stream_row
from elastable.embedding_store.native.work_stealing import join_work, leave_work, next_pieces

__all__ = [
    "KEYS_A_PIECE",
    "WAYS",
    "admit_keys",
    "find_frames",
    "halve_counts",
    "join_chunks",
    "read_shared",
    "remove_keys",
    "set_of",
]

WAYS = 8
"""Frames in a set."""

Counts = npt.NDArray[np.uint8]
KEYS_A_PIECE = 1 << 10
"""Keys of a piece of work: what is known of them stays in the first cache from finding to copying."""

_AHEAD = 64
_MOST_USES = 15  # further uses write nothing, so that threads do not fight for a hot counter


@kernel
def set_of(key: int, sets: int, dense: bool) -> np.int64:
    if dense:
        # key modulo sets, by a multiplication in place of a division of integers: keys are below 2**52.
        rest = np.int64(key) - np.int64(np.float64(key) * (1.0 / sets)) * np.int64(sets)
        rest = rest + np.int64(sets) if rest < 0 else rest
        return rest - np.int64(sets) if rest >= sets else rest
    return np.int64(((mixed_bits(np.uint64(key)) >> np.uint64(32)) * np.uint64(sets)) >> np.uint64(32))


@kernel
def _way_of(keys: Int64, home: np.int64, key: int) -> int:
    way = -1
    for k in range(WAYS):  # all of them: without a branch it runs vectorised
        way = k if keys[home, k] == key else way
    return way


@kernel
def find_frames(
    keys: Int64, uses: Counts, dense: bool, wanted: Int64, frames: Int64, cold: Int64, counted: bool
) -> int:
    sets, count, last = len(keys), 0, len(wanted) - 1
    counters = uses.reshape(-1, WAYS)
    for i in range(len(wanted)):  # of its own: so it runs vectorised, and each set is computed once
        frames[i] = set_of(wanted[i], sets, dense)
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
def read_shared(
    keys: Int64,
    uses: Counts,
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
    """Keys that have no frame in chunk c are `cold[c * KEYS_A_PIECE :][: counts[c]]`, counted from its start."""
    frames = np.empty(KEYS_A_PIECE, np.int64)
    join_work(counter)
    first, last = next_pieces(counter, len(counts))
    while first < last:
        for chunk in range(first, last):
            start = chunk * KEYS_A_PIECE
            stop = min(start + KEYS_A_PIECE, len(wanted))
            counts[chunk] = find_frames(keys, uses, dense, wanted[start:stop], frames, cold[start:stop], counted)
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
def join_chunks(cold: Int64, counts: Int64) -> int:
    """What chunks left in `cold`, side by side at its beginning; how many they are."""
    total = 0
    for chunk in range(len(counts)):
        start = chunk * KEYS_A_PIECE
        for k in range(counts[chunk]):
            cold[total] = start + cold[start + k]
            total += 1
    return total


@kernel
def _sighted(sketch: Counts, key: int, at_least: np.uint8) -> np.uint8:
    """Counts a key that has no frame once more, in its two counters; its count."""
    mask = np.uint64(len(sketch) - 1)
    mixed = mixed_bits(np.uint64(~key))
    first, second = mixed & mask, (mixed >> np.uint64(32)) & mask
    count = sketch[first] if sketch[first] < sketch[second] else sketch[second]
    count = count + np.uint8(1) if count < _MOST_USES else count
    count = at_least if count < at_least else count
    sketch[first] = count if sketch[first] < count else sketch[first]
    sketch[second] = count if sketch[second] < count else sketch[second]
    return count


@kernel
def admit_keys(
    keys: Int64,
    uses: Counts,
    marks: Counts,
    sketch: Counts,
    dense: bool,
    wanted: Int64,
    frames: Int64,
    gone_keys: Int64,
    gone_frames: Int64,
) -> int:
    sets, gone = len(keys), 0
    for i in range(len(wanted)):
        prefetch(keys, set_of(wanted[min(i + _AHEAD, len(wanted) - 1)], sets, dense))
        key = wanted[i]
        frames[i] = -1
        home = set_of(key, sets, dense)
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
def remove_keys(
    keys: Int64, uses: Counts, marks: Counts, sketch: Counts, dense: bool, vacant: tuple[int, int], unwanted: Int64
) -> None:
    sets = len(keys)
    for i in range(len(unwanted)):
        prefetch(keys, set_of(unwanted[min(i + _AHEAD, len(unwanted) - 1)], sets, dense))
        key = unwanted[i]
        if dense and key < 0:
            continue
        home = set_of(key, sets, dense)
        way = _way_of(keys, home, key)
        if way < 0:
            continue
        frame = home * WAYS + way
        _sighted(sketch, key, uses[frame])
        empty = -1
        if not dense:
            empty = vacant[0] if set_of(vacant[0], sets, dense) != home else vacant[1]
        keys[home, way] = empty
        uses[frame] = 0
        marks[frame] = 0


@kernel
def halve_counts(counts: Counts, up: np.uint8) -> None:
    """Rounds up where `up` is 1: a key that has a frame keeps a use, so one sighting of another does not oust it."""
    for i in range(len(counts)):
        counts[i] = (counts[i] + up) >> np.uint8(1)
