"""The hot rows of one table in memory, by id."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.native.ids.hot_set import BYTES_A_FRAME, HotSet
from elastable.embedding_store.native.range_pool import RangePool
from elastable.embedding_store.native.row_gather import can_stream, gather
from elastable.embedding_store.native.slab import Slab
from elastable.embedding_store.tables.grouping import Int32

__all__ = ["CachedRows", "cached_row_bytes"]

_ROWS_A_THREAD = 1 << 13


class CachedRows:
    """Weights of some rows. `read` may run from many threads at once, beside nothing else."""

    def __init__(self, spec: TableSpec, rows: int) -> None:
        """Room for about `rows` rows; memory is taken as it is touched."""
        self.spec = spec
        self._hot = HotSet(rows, dense=False)
        self._rows = Slab(self._hot.frames, spec.dim)

    @property
    def count(self) -> int:
        """Rows that are held now."""
        return self._hot.count()

    def find(self, ids: Int64, counted: bool, pool: RangePool) -> tuple[Int64, Int64]:
        """Where rows lie.

        Args:
            ids: int64 `[n]`.
            counted: Whether this makes the rows hotter.
            pool: Threads to look with.

        Returns:
            frames: int64 `[n]`, for `read`; -1 where a row is not held.
            missing: int64: indices in `ids` of those, ascending.
        """
        frames, missing = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        parts: list[tuple[int, int]] = []

        def look(start: int, stop: int) -> None:
            count = self._hot.find(ids[start:stop], frames[start:stop], missing[start:stop], counted)
            missing[start : start + count] += start
            parts.append((start, count))

        pool.run(look, len(ids), _ROWS_A_THREAD)
        return frames, np.concatenate([missing[start : start + count] for start, count in sorted(parts)])

    def read(self, frames: Int64, out: Float32) -> None:
        """Rows that are held, at `frames` int64 `[n]`, into `out` float32 `[n, dim]`; others are left alone."""
        gather(self._rows.array, frames, out, can_stream(out))

    def admit(self, ids: Int64, rows: Float32, inverse: Int32) -> None:
        """Holds those rows that are hot enough.

        Args:
            ids: int64 `[n]`, that were missing; may repeat.
            rows: float32 `[u, dim]`.
            inverse: int32 `[n]`: `rows[inverse[i]]` is the row of `ids[i]`.
        """
        frames, gone, lost = (np.empty(len(ids), np.int64) for _ in range(3))
        self._hot.admit(ids, frames, gone, lost)
        held = np.flatnonzero(frames >= 0)
        self._rows.array[frames[held]] = rows[inverse[held]]

    def remove(self, ids: Int64) -> None:
        """Holds the rows of `ids` int64 `[n]` no more; which of them were hot is remembered."""
        self._hot.remove(ids)

    def clear(self) -> None:
        """Holds nothing any more."""
        self._hot.clear()


def cached_row_bytes(spec: TableSpec) -> int:
    """Bytes that a row takes in the cache, with what finds it."""
    return 4 * spec.dim + BYTES_A_FRAME
