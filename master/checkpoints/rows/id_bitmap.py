"""A set of the ids of a fixed table: a bit each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt64
from elastable.embedding_store.native.kernel import kernel

__all__ = ["IdBitmap"]


class IdBitmap:
    """Ids from 0 to `size` - 1 that were added. Words without an id take no memory until one is added near them."""

    def __init__(self, size: int) -> None:
        self._words: UInt64 = np.zeros((size + 63) // 64, np.uint64)
        self._count = 0

    @property
    def bytes(self) -> int:
        """Of memory, at most."""
        return self._words.nbytes

    def __len__(self) -> int:
        return self._count

    def add(self, ids: Int64) -> None:
        """Ids int64 `[n]`; they may be there."""
        self._count += int(_mark(self._words, ids))

    def blocks(self, most: int) -> Iterator[Int64]:
        """All ids, in their order, at most so many at a time (and at least one)."""
        found = np.empty(most, np.int64)
        following = 0
        while True:
            count, following = _marked(self._words, following, found)
            if not count:
                return
            yield found[:count].copy()


@kernel
def _mark(words: UInt64, ids: Int64) -> int:
    added = 0
    for one in ids:
        bit = np.uint64(1) << np.uint64(one & 63)
        word = words[one >> 6]
        if not word & bit:
            words[one >> 6] = word | bit
            added += 1
    return added


@kernel
def _marked(words: UInt64, following: int, found: Int64) -> tuple[int, int]:
    """Ids from `following` on, until `found` is full; their number, and where to go on."""
    count = 0
    place = following >> 6
    while place < len(words):
        word = words[place]
        if word:
            for bit in range(following & 63 if place == following >> 6 else 0, 64):
                if word >> np.uint64(bit) & np.uint64(1):
                    if count == len(found):
                        return count, (place << 6) + bit
                    found[count] = (place << 6) + bit
                    count += 1
        place += 1
    return count, place << 6
