"""Frames: room in memory for some of a table's rows, and which row has which."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64, UInt8
from elastable.embedding_store.engine.frames.frame_kernels import (
    CLEAN,
    FREE,
    HELD,
    HOTTEST,
    TAKEN,
    frames_at,
    put_in,
    take_frames,
)
from elastable.embedding_store.engine.frames.framed_gather import ColdSource, gather_framed
from elastable.embedding_store.native.range_pool import WorkCounter
from elastable.embedding_store.native.slab import Slab

__all__ = ["RowFrames"]

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
        """Bytes of memory beside the rows themselves."""
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
        count = frames_at(self._frame_of.array[:, 0], self._heat, positions, frames, cold, warm)
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
        """Rows at positions int64 `[n]` into `out`, as `gather_framed`; with `counter`, those that this thread takes.

        Returns:
            The indices of those that have no frame, and of those that `source` did not have either.
        """
        cold, unread = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
        place = self._frame_of.array[:, 0], self._heat, positions, out
        count, missed = gather_framed(rows, *place, stream, source, cold, unread, counter)
        return cold[:count], unread[:missed]

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
