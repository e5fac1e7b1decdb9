"""What a tier keeps of which rows there are: touches that stay true while rows are not written, and positions."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.contract.row_data import NEXT_VERSION

__all__ = ["StoredTouches", "filled_positions"]

FREQUENCY_BITS = 32
"""Of a count in a record; above them stands how many times the count had begun anew."""

UNSETTLED = NEXT_VERSION
"""From here on: put without a version; the rest counts how often such rows got theirs before."""


@dataclass(slots=True)
class StoredTouches:
    """What has happened to all touches of a table at once, which no record was rewritten for.

    Attributes:
        settled: The versions that rows that were put without one got, in the order in which that happened.
        counted: How many times eviction has begun to count anew how often rows are touched.
        unsettled: Whether rows may have been put without a version since the last of these.
    """

    settled: list[int] = field(default_factory=list)
    counted: int = 0
    unsettled: bool = False

    def copy(self, unsettled: bool | None = None) -> StoredTouches:
        """The same, now; `unsettled`: where the table itself knows."""
        return StoredTouches(list(self.settled), self.counted, self.unsettled if unsettled is None else unsettled)

    def encode(self, touches: Int64) -> UInt8:
        """`RowBlock.touches` int64 `[n, 2]`, which is changed, as uint8 `[n, 16]`."""
        touches[touches[:, 0] == UNSETTLED, 0] += len(self.settled)
        touches[:, 1] |= self.counted << FREQUENCY_BITS
        return touches.astype("<i8", copy=False).view(np.uint8)

    def decode(self, stored: UInt8) -> Int64:
        """What `encode` made, now or before, as it is now: int64 `[n, 2]`."""
        touches: Int64 = stored.copy().view("<i8").astype(np.int64, copy=False)
        waiting = np.flatnonzero(touches[:, 0] >= UNSETTLED)
        if len(waiting):
            versions = np.array([*self.settled, UNSETTLED], np.int64)
            touches[waiting, 0] = versions[np.minimum(touches[waiting, 0] - UNSETTLED, len(self.settled))]
        touches[touches[:, 1] >> FREQUENCY_BITS < self.counted, 1] = 0
        touches[:, 1] &= (1 << FREQUENCY_BITS) - 1
        return touches


def filled_positions(ids: Int64, positions: Int64) -> tuple[Int64, Int64]:
    """Ids by position, without gaps: positions of deleted rows get ids that no row has.

    Returns:
        everywhere: int64 `[highest position + 1]`.
        gaps: int64, those of them that are no one's.
    """
    size = int(positions.max(initial=-1)) + 1
    free = np.ones(size, np.bool_)
    free[positions] = False
    # Among twice as many numbers as there are ids at least half are no one's.
    unused = np.setdiff1d(np.arange(len(ids) + np.count_nonzero(free)), ids)[: np.count_nonzero(free)]
    everywhere = np.empty(size, np.int64)
    everywhere[positions] = ids
    everywhere[free] = unused
    return everywhere, unused
