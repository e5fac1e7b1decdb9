"""Which keys are hot: the directory of a cache, set-associative, that admits by frequency.

Frames come in sets of eight, whose keys fill one cache line; a key belongs to
one set. Every frame has a counter of its uses. A key without a frame
is counted in a sketch, and gets a frame once it has been asked for more often
than the least used key of its set (TinyLFU: Einziger, Friedman, Manes, ACM ToS
2017). So a scan of keys that come once washes nothing out. All counts are
halved now and then: what was hot once gives way.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.native.ids.hot_set_kernels import (
    KEYS_A_PIECE,
    WAYS,
    admit_keys,
    find_frames,
    halve_counts,
    join_chunks,
    read_shared,
    remove_keys,
    set_of,
)
from elastable.embedding_store.native.range_pool import RangePool
from elastable.embedding_store.native.row_gather import rows_ahead
from elastable.embedding_store.native.slab import Slab
from elastable.embedding_store.native.work_stealing import WorkCounter

__all__ = ["BYTES_A_FRAME", "HotSet", "whole_sets"]

BYTES_A_FRAME = 18
"""Bytes that a frame takes here: key, uses and mark, and at most 8 of the sketch."""

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
        return int(find_frames(self._keys, self._uses, self._dense, keys, frames, cold, counted))

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
        chunks = -(-len(keys) // KEYS_A_PIECE)
        counter, cold, counts = WorkCounter(pool.threads), np.empty(len(keys), np.int64), np.empty(chunks, np.int64)
        ahead = rows_ahead(rows.shape[1])
        work = partial(read_shared, self._keys, self._uses, self._dense, keys, rows, out, stream, ahead, counted,
                       cold, counts, counter.state)  # fmt: skip
        pool.together(work, counter)
        return cold[: join_chunks(cold, counts)]

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
            halve_counts(self._uses, np.uint8(1))
            self._asked = 0
        if self._sighted > len(self._sketch):  # more would all fall on counters that others have raised
            halve_counts(self._sketch, np.uint8(0))
            self._sighted = 0
        gone = admit_keys(
            self._keys, self._uses, self.marks, self._sketch, self._dense, keys, frames, gone_keys, gone_frames
        )
        return int(gone)

    def remove(self, keys: Int64) -> None:
        """Takes frames away from keys int64 `[n]`; how hot they were is remembered."""
        remove_keys(self._keys, self._uses, self.marks, self._sketch, self._dense, self._vacant, keys)

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
            home = set_of(0, len(self._keys), False)
            other = next(key for key in range(1, 1 << 20) if set_of(key, len(self._keys), False) != home)
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
