"""Which rows lookups have read from a tier that is near, so that those that come again are given frames."""

from __future__ import annotations

import threading

import numpy as np

from elastable.embedding_store.contract.arrays import Int64

__all__ = ["MissedRows"]

_MOST = 1 << 20  # positions that are kept; what is read beyond them is not counted


class MissedRows:
    """Positions that were read without a frame. Readers add to them; `again` has them alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: list[Int64] = []
        self.count = 0

    def add(self, positions: Int64) -> None:
        """Counts reads of positions int64 `[n]`, which are kept."""
        with self._lock:
            if len(positions) and self.count < _MOST:
                self._read.append(positions)
                self.count += len(positions)

    def again(self) -> Int64:
        """Positions that were read more than once, each once, ascending; counting begins anew.

        So a pass over all rows gives frames to none of them.
        """
        with self._lock:
            read, self._read = self._read, []
            self.count = 0
        if not read:
            return np.empty(0, np.int64)
        positions = np.sort(np.concatenate(read))
        repeated: Int64 = np.unique(positions[1:][positions[1:] == positions[:-1]])
        return repeated
