"""Frames: room in memory for some of a table's rows, and which row has which."""

from typing import NamedTuple

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int32, Int64, UInt8
from elastable.embedding_store.contract.tier import MappedRecords
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.range_pool import WorkCounter, fail_work, next_pieces
from elastable.embedding_store.native.record_checks import load_first, part_stride, prefetch_bytes, record_key
from elastable.embedding_store.native.row_gather import can_stream, gather_range, rows_ahead, rows_in_piece
from elastable.embedding_store.native.slab import Slab
from elastable.embedding_store.tables.checks import any_outside

# Rows in frames gathered by position, a piece at a time; those without a frame are read from mapped memory


class ColdSource(NamedTuple):
    """Where rows without a frame are read on the way.

    Attributes:
        records: Of the table; the first part is a row, in float32.
        ids: int64 `[rows]`, of every position; empty: an id is its position.
        out: uint8: all bytes of the target, whose rows lie side by side.
    """

    records: MappedRecords
    ids: Int64
    out: UInt8


NOWHERE = ColdSource(MappedRecords(np.empty(0, np.uint8), 0, 0, 0, 0), np.empty(0, np.int64), np.empty(0, np.uint8))
"""Rows without a frame are left alone."""

_Frames = tuple[Float32, Int32, UInt8]
"""Rows by frame, and `frame_of` and `heat` as of `_frames_at`."""

_How = tuple[bool, int, int]
"""Whether rows go past the caches, how many rows ahead one is asked for, and the rows of a piece."""


@kernel
def _gather_shared(
    hot: _Frames, source: ColdSource, positions: Int64, out: Float32, how: _How, cold: Int64, unread: Int64, work: Int64
) -> tuple[int, int]:
    size = how[2]
    count, missed, total = 0, 0, (len(positions) + size - 1) // size
    first, last = next_pieces(work, total)
    while first < last:
        start, stop = first * size, min(last * size, len(positions))
        if any_outside(positions[start:stop], len(hot[1])):
            fail_work(work)
        else:
            some, its = positions[start:stop], out[start:stop]
            more, left = _gather(hot, source, some, its, how, cold[count:], unread[missed:], start)
            count += more
            missed += left
        first, last = next_pieces(work, total)
    return count, missed


@kernel
def _gather(
    hot: _Frames, source: ColdSource, positions: Int64, out: Float32, how: _How, cold: Int64, unread: Int64, base: int
) -> tuple[int, int]:
    """In loops a piece: reads of the first, which finds the frames, do not wait for those of the second.

    Records of rows without a frame are asked for before the others are copied, and are there afterwards.
    """
    rows, frame_of, heat = hot
    (file, begin, items, first_bytes, stride), ids, flat = source
    stream, ahead, size = how
    count, missed, frames = 0, 0, np.empty(min(size, len(positions)), np.int64)
    staged, lines, part = np.empty(part_stride(first_bytes), np.uint8), file.reshape(-1, 1), part_stride(first_bytes)
    for start in range(0, len(positions), size):
        stop = min(start + size, len(positions))
        found = cold[count:]
        more = _frames_at(frame_of, heat, positions[start:stop], frames, found, True)
        if len(file):
            for k in range(more):
                prefetch_bytes(lines, begin + stride * positions[start + found[k]], part)
        gather_range(rows, frames[: stop - start], out[start:stop], stream, ahead)
        for k in range(more):
            found[k] += base + start
            position = positions[found[k] - base]
            at = begin + stride * position
            there = position < items and at + part <= len(file)
            if there:
                row_id = ids[position] if len(ids) else position
                there = load_first(
                    file, at, first_bytes, record_key(row_id, position), staged, flat, first_bytes * found[k]
                )
            if not there:
                unread[missed] = found[k]
                missed += 1
        count += more
    return count, missed


# What is done to many frames at once: finding them, taking them, and marking which of them have changed


FREE, TAKEN = -1, -2
"""In place of a frame's position: nobody has it, and it is about to be given to a row."""

CLEAN, CHANGED, WRITING = 0, 1, 2
"""State of a row: as in the tier; not written since it changed; being written as it was."""

HOTTEST, HELD = 3, 255
"""Heat: the highest that reading gives; and that of a frame that must not be taken."""


@kernel
def _frames_at(frame_of: Int32, heat: UInt8, positions: Int64, frames: Int64, cold: Int64, warm: bool) -> int:
    """Finds the frame of each position.

    Args:
        frame_of: int32 `[rows]`: 1 + the frame of each position, 0: it has none.
        heat: uint8 `[frames]`, rises where `warm`.
        positions: int64 `[n]`; negative ones have no frame and are not cold.
        frames: int64 `[n]`, gets the frame, -1 for none.
        cold: int64 `[n]`, gets the indices of those that have none.
        warm: Whether this counts as a use.

    Returns:
        How many are cold.
    """
    count = 0
    for i in range(len(positions)):
        position = positions[i]
        if position < 0:
            frames[i] = -1
            continue
        frame = np.int64(frame_of[position]) - 1
        frames[i] = frame
        if frame < 0:
            cold[count] = i
            count += 1
        elif warm and heat[frame] < HOTTEST:
            heat[frame] += 1
    return count


@kernel
def take_frames(
    frame_of: Int32, position_of: Int64, heat: UInt8, state: UInt8, hand: int, most: int, taken: Int64
) -> tuple[int, int]:
    """Takes frames for other rows, from `hand` on: free ones, and those of clean rows that were not used lately.

    Args:
        frame_of: As of `_frames_at`.
        position_of: int64 `[frames]`, whose each frame is, `FREE` or `TAKEN`.
        heat: uint8 `[frames]`; falls where the hand passes.
        state: uint8 `[frames]`.
        hand: The frame to begin with.
        most: Frames to look at.
        taken: int64 `[n]`, gets the frames.

    Returns:
        How many were taken, n at most, and the next hand.
    """
    count, frames = 0, len(position_of)
    for _ in range(most):
        if count == len(taken):
            break
        frame = hand
        hand = 0 if hand + 1 == frames else hand + 1
        position = position_of[frame]
        if position == TAKEN:
            continue
        if position >= 0:
            if state[frame] != CLEAN or heat[frame] == HELD:
                continue
            if heat[frame] > 0:
                heat[frame] -= 1
                continue
            frame_of[position] = 0
        position_of[frame] = TAKEN
        heat[frame] = 0
        taken[count] = frame
        count += 1
    return count, hand


@kernel
def put_in(frame_of: Int32, position_of: Int64, positions: Int64, frames: Int64) -> None:
    """Gives frames that were taken to positions, both int64 `[n]`."""
    for i in range(len(positions)):
        frame_of[positions[i]] = frames[i] + 1
        position_of[frames[i]] = positions[i]


@kernel
def mark_changed(state: UInt8, frames: Int64) -> None:
    """The rows in these frames, int64 `[n]`, are about to change."""
    for i in range(len(frames)):
        state[frames[i]] = CHANGED


@kernel
def collect_changed(state: UInt8, cursor: int, end: int, frames: Int64) -> tuple[int, int]:
    """Finds rows that have changed, from frame `cursor` to `end`, and marks them as being written.

    Returns:
        How many were found, at most as many as `frames` int64 `[n]` has room for, and the next cursor.
    """
    count = 0
    while cursor < end and count < len(frames):
        if state[cursor] == CHANGED:
            state[cursor] = WRITING
            frames[count] = cursor
            count += 1
        cursor += 1
    return count, cursor


@kernel
def mark_written(state: UInt8, frames: Int64, now: int) -> None:
    """Rows that were being written are `now` clean, or changed as before; others have changed since, or are gone."""
    for i in range(len(frames)):
        if frames[i] >= 0 and state[frames[i]] == WRITING:
            state[frames[i]] = now


_PASSES = HOTTEST + 2  # after so many rounds every clean frame that is not held has been taken


class RowFrames:
    """Which positions of a table have frames. Callers do the locking; `find` may run on many threads at once.

    A frame whose row has changed since it was written to the tier keeps it; the others go to whoever needs them, those
    that were used least first (the CLOCK algorithm with a small count).

    Attributes:
        state: uint8 `[frames]`: `CLEAN`, `CHANGED` or `WRITING`.
    """

    def __init__(self, rows: int, frames: int) -> None:
        """Room for `rows` positions and `frames` frames, at least 1, all free. Raises `MemoryError`."""
        self._frame_of = Slab(max(1, rows), 1, np.int32)
        self._position_of: Int64 = np.full(frames, FREE, np.int64)
        self._heat: UInt8 = np.zeros(frames, np.uint8)
        self.state: UInt8 = np.zeros(frames, np.uint8)
        self._hand = 0
        self._held: list[Int64] = []
        self._most_changed = frames  # rows that have changed are no more than these

    @property
    def count(self) -> int:
        """Frames."""
        return len(self.state)

    @property
    def bytes(self) -> int:
        """Bytes of memory besides the rows themselves."""
        return int(self._frame_of.array.nbytes) + 10 * self.count

    def grow_positions(self, rows: int) -> None:
        """Makes room for positions. Raises `MemoryError`, and nothing has changed."""
        self._frame_of.grow(rows)

    def add_frames(self, frames: int) -> None:
        """There are `frames` frames now, more than before."""
        more = frames - self.count
        self._position_of = np.concatenate((self._position_of, np.full(more, FREE, np.int64)))
        self._heat = np.concatenate((self._heat, np.zeros(more, np.uint8)))
        self.state = np.concatenate((self.state, np.zeros(more, np.uint8)))

    def find(self, positions: Int64, warm: bool = False) -> tuple[Int64, Int64]:
        """Frames int64 `[n]` of positions int64 `[n]`, -1 for none, and the indices of positions that have none.

        `warm`: this is a use of the rows. Negative positions have no frame and are not among the indices.
        """
        frames, cold = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
        count = _frames_at(self._frame_of.array[:, 0], self._heat, positions, frames, cold, warm)
        return frames, cold[:count]

    def gather(
        self,
        rows: Float32,
        positions: Int64,
        out: Float32,
        stream: bool,
        source: ColdSource,
        counter: WorkCounter | None = None,
    ) -> tuple[Int64, Int64]:
        """out[i] = the row in the frame of positions[i], where it has one, else what `source` has.

        Args:
            rows: float32 `[frames, dim]`.
            positions: int64 `[n]`.
            out: float32 `[n, dim]`; rows may lie apart, columns may not. Other rows are left alone.
            stream: Past the caches; without `counter` only where `can_stream(out)`.
            source: Reads rows without a frame.
            counter: Of the threads that call this with the same arguments. Each has joined it, and takes some rows, and
                some more. Where there is no such position, it fails, and rows may be missing in `out`. None: this
                thread takes all rows, at positions that are known to be right.

        Returns:
            The indices of those that have no frame, and of those that `source` did not have either.
        """
        cold, unread = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
        hot, dim = (rows, self._frame_of.array[:, 0], self._heat), rows.shape[1]
        how = stream and (counter is None or can_stream(out)), rows_ahead(dim), rows_in_piece(dim)
        if counter is None:
            count, missed = _gather(hot, source, positions, out, how, cold, unread, 0)
        else:
            count, missed = _gather_shared(hot, source, positions, out, how, cold, unread, counter.state)
        return cold[: int(count)], unread[: int(missed)]

    def take(self, count: int, passes: int = _PASSES) -> Int64:
        """Up to `count` frames for other rows, int64; `put_in` or `give_back` them.

        `passes`: how often all frames are looked at; in one, only rows that were not used lately give way.
        """
        taken = np.empty(count, np.int64)
        most = passes * self.count
        found, self._hand = take_frames(
            self._frame_of.array[:, 0], self._position_of, self._heat, self.state, self._hand, most, taken
        )
        return taken[:found]

    def give_back(self, frames: Int64) -> None:
        """Frames that were taken are free again."""
        self._position_of[frames] = FREE

    def put_in(self, positions: Int64, frames: Int64) -> None:
        """Gives frames that were taken to positions, both int64 `[n]`; their rows are clean."""
        put_in(self._frame_of.array[:, 0], self._position_of, positions, frames)

    def hold(self, frames: Int64) -> None:
        """Nobody takes these frames, int64 `[n]`, until `release`."""
        self._heat[frames] = HELD
        self._held.append(frames)
        self.may_change(len(frames))

    @property
    def held(self) -> int:
        """Frames that nobody takes now, those that were held twice counted twice."""
        return sum(len(frames) for frames in self._held)

    def release(self) -> None:
        """Frames that were held may be taken again, once they are clean."""
        for frames in self._held:
            self._heat[frames] = HOTTEST
        self._held.clear()

    def free(self, positions: Int64) -> None:
        """There are no rows at positions int64 `[n]` any more, each once."""
        frames, _ = self.find(positions)
        frames = frames[frames >= 0]
        self._frame_of.array[self._position_of[frames], 0] = 0
        self._position_of[frames] = FREE
        self.state[frames] = CLEAN
        self._heat[frames] = 0

    def positions(self, frames: Int64) -> Int64:
        """Positions int64 `[n]` of frames that have rows."""
        return self._position_of[frames]

    def kept(self, most: int) -> Int64:
        """Frames of every row that is not clean, and of the hottest others, `most` together where these are fewer."""
        used = self._position_of >= 0
        unclean = np.flatnonzero(used & (self.state != CLEAN))
        others = np.flatnonzero(used & (self.state == CLEAN))
        room = max(0, most - len(unclean))
        if len(others) > room:
            others = others[np.argsort(self._heat[others], kind="stable")[len(others) - room :]]
        return np.concatenate((unclean, others))

    @property
    def changed(self) -> int:
        """Rows that have changed since they were written, or are being written."""
        return int(np.count_nonzero(self.state))

    def may_change(self, rows: int) -> None:
        """So many rows are about to change; of those that are held this is known."""
        self._most_changed += rows

    def more_changed_than(self, most: int) -> bool:
        """Whether `changed` is more than that; counts seldom."""
        if self._most_changed > most:
            self._most_changed = self.changed
        return self._most_changed > most


assert TAKEN < FREE < 0
