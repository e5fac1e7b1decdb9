"""What a tier has answered about ids, kept until somebody has the store alone."""

from __future__ import annotations

import threading

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.native.ids.id_index import IdIndex

__all__ = ["ABSENT", "NEAR", "UNKNOWN", "NearRecords"]

NEAR = 1 << 38
"""The first place of a record here; positions of rows in memory are smaller."""

ABSENT, UNKNOWN = -1, -2
"""Instead of a place: the tier has no such record; and nobody has asked."""


class NearRecords:
    """Records by id, and ids that have none. Many threads may add and find; whoever clears has the store alone.

    Attributes:
        answers: Ids that were added since everything was cleared.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Nothing is known."""
        self._index = IdIndex()
        self._places: Int64 = np.empty(0, np.int64)
        self._starts: list[int] = []
        self._blocks: list[UInt8] = []
        self._records = 0
        self.answers = 0

    @property
    def bytes(self) -> int:
        """Bytes of memory."""
        with self._lock:
            return self._index.bytes + int(self._places.nbytes) + sum(block.nbytes for block in self._blocks)

    def add(self, ids: Int64, records: UInt8, missing: Int64) -> None:
        """Takes an answer.

        Args:
            ids: int64 `[n]`, each once.
            records: uint8 `[n, bytes]`.
            missing: int64: indices of ids that have no record.
        """
        there = np.ones(len(ids), np.bool_)
        there[missing] = False
        kept = records if not len(missing) else records[there]
        with self._lock:
            places = np.full(len(ids), ABSENT)
            places[there] = NEAR + self._records + np.arange(len(kept))
            if len(kept):
                self._starts.append(self._records)
                self._blocks.append(kept)
                self._records += len(kept)
            self._index.reserve(len(ids))
            entries = np.empty(len(ids), np.int64)
            self._index.claim(ids, entries)
            if self._index.capacity > len(self._places):
                self._places = np.concatenate((self._places, np.empty(self._index.capacity - len(self._places), int)))
            self._places[entries] = places
            self.answers += len(ids)

    def find(self, ids: Int64) -> Int64:
        """int64 `[n]`: the place of the record of each of `ids`, `ABSENT` or `UNKNOWN`."""
        with self._lock:
            entries = np.empty(len(ids), np.int64)
            self._index.find(ids, entries)
            if not len(self._places):
                return np.full(len(ids), UNKNOWN)
            return np.where(entries < 0, UNKNOWN, self._places[entries])

    def there(self) -> Int64:
        """int64: every id that has a record here."""
        with self._lock:
            ids, entries, _ = self._index.scan(0, max(1, self._index.positions_given))
            return ids[self._places[entries] >= 0] if len(ids) else ids

    def discard(self, ids: Int64) -> None:
        """Nothing is known of `ids` int64 `[n]` any more; places of records stay good."""
        with self._lock:
            self._index.remove(ids)

    def records(self, places: Int64) -> UInt8:
        """The records at places int64 `[n]`, at least one: uint8 `[n, bytes]`."""
        with self._lock:
            starts, blocks = np.array(self._starts), list(self._blocks)
        offsets = places - NEAR
        of = np.searchsorted(starts, offsets, side="right") - 1
        records = np.empty((len(places), blocks[0].shape[1]), np.uint8)
        for number in np.unique(of).tolist():
            here = of == number
            records[here] = blocks[number][offsets[here] - starts[number]]
        return records
