"""Records that lookups have read from the tier, until somebody has the store alone and gives them frames."""

from __future__ import annotations

import threading

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt8

__all__ = ["NearRows", "once"]


def once(positions: Int64) -> Int64:
    """Positions int64 `[n]` in ascending order, each once."""
    ordered = np.sort(positions)
    repeated = ordered[1:] == ordered[:-1]
    return ordered[np.append(True, ~repeated)] if repeated.any() else ordered


class NearRows:
    """Records by position. Readers add to them and read them; `drain` has them alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: list[tuple[Int64, UInt8]] = []
        self.rows = 0
        self.bytes = 0

    def add(self, positions: Int64, records: UInt8) -> None:
        """Keeps records uint8 `[n, bytes]` of positions int64 `[n]`, ascending and each once."""
        with self._lock:
            self._read.append((positions, records))
            self.rows += len(positions)
            self.bytes += records.nbytes

    def find(self, positions: Int64) -> list[tuple[Int64, UInt8, Int64]]:
        """Where the records of positions int64 `[n]` are.

        Returns:
            Indices in `positions`, records, and which of the records is each one's; and so on. No index is there
            twice; those that are nowhere have no record here.
        """
        found: list[tuple[Int64, UInt8, Int64]] = []
        left = np.arange(len(positions))
        for keys, records in reversed(self._read):
            if not len(left):
                break
            places = np.minimum(np.searchsorted(keys, positions[left]), len(keys) - 1)
            there = keys[places] == positions[left]
            if there.any():
                found.append((left[there], records, places[there]))
                left = left[~there]
        return found

    def drain(self) -> list[tuple[Int64, UInt8]]:
        """Everything that was added, the last first; nothing is kept."""
        with self._lock:
            read, self._read = self._read, []
            self.rows = self.bytes = 0
        return read[::-1]
