"""The seeded order of an epoch's records: the same in every process, on every NumPy."""

from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import BadInput


class RecordOrder:
    """Positions of an epoch's order -> record indices.

    Args:
        records: How many there are.
        taken: Record indices, int64 `[stop - start]`, at positions that lie within them.
    """

    def __init__(self, records: int, taken: Callable[[int, int], Int64]) -> None:
        self._records, self._taken = records, taken

    def take(self, start: int, stop: int) -> Int64:
        """Record indices, int64 `[stop - start]`, at positions start .. stop - 1.

        Raises:
            BadInput: the positions do not lie within the records.
        """
        if not 0 <= start <= stop <= self._records:
            raise BadInput(f"record order: positions {start}..{stop} do not lie within {self._records} records")
        return self._taken(start, stop)


@lru_cache(maxsize=4)
def record_order(records: int, epoch: int, seed: int, shuffle: bool, block: int | None) -> RecordOrder:
    """The order in which an epoch visits its records: a pure function of its arguments.

    Args:
        records: How many records there are.
        epoch: Counted from 0; every epoch has a separate order.
        seed: The job's.
        shuffle: False: 0, 1, 2, ... in every epoch.
        block: Records that a reader fetches in one range. Blocks are permuted, and the records within each, so that a
            micro-batch touches few ranges. None: one permutation of all records.
    """
    if records < 0 or epoch < 0:
        raise BadInput(f"record order: records and epoch must not be negative, got {records} and {epoch}")
    if block is not None and block < 1:
        raise BadInput(f"record order: block must be None or at least 1, got {block}")
    if not shuffle:
        return RecordOrder(records, partial(np.arange, dtype=np.int64))
    if block is None or block >= records:
        order = _permutation(records, seed, epoch, 0)
        return RecordOrder(records, lambda start, stop: order[start:stop].copy())
    return RecordOrder(records, _Blocks(records, block, seed, epoch).take)


def _permutation(count: int, seed: int, epoch: int, stream: int) -> Int64:
    # NumPy promises Philox's raw words for ever, but not what `Generator.permutation` makes of them.
    # SeedSequence takes non-negative words; a negative seed is its two's complement.
    words = np.random.SeedSequence((seed & (2**64 - 1), epoch, stream))
    return np.argsort(np.random.Philox(words).random_raw(count), kind="stable").astype(np.int64, copy=False)


class _Blocks:
    """Only the order of the blocks is held; the order within one is made when it is touched."""

    def __init__(self, records: int, block: int, seed: int, epoch: int) -> None:
        self._records, self._block, self._seed, self._epoch = records, block, seed, epoch
        blocks = -(-records // block)
        self._blocks = _permutation(blocks, seed, epoch, 0)
        sizes = np.where(self._blocks == blocks - 1, records - (blocks - 1) * block, block)
        self._ends = np.cumsum(sizes)
        self._within = lru_cache(maxsize=8)(self._order_of_block)

    def take(self, start: int, stop: int) -> Int64:
        parts = [np.empty(0, np.int64)]
        place = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            end = int(self._ends[place])
            order = self._within(place)
            first = end - order.size
            parts.append(order[start - first : min(stop, end) - first])
            start, place = min(stop, end), place + 1
        return np.concatenate(parts)

    def _order_of_block(self, place: int) -> Int64:
        block = int(self._blocks[place])
        first = block * self._block
        size = min(self._block, self._records - first)
        return first + _permutation(size, self._seed, self._epoch, block + 1)
