"""The memory ceiling: bytes read in order by all threads of a pool, with no other work.

No lookup of scattered rows can be faster; the difference is the cost of random
access, sums and results.
"""

from collections.abc import Callable, Iterator

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt64
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.range_pool import RangePool, WorkCounter, join_work, leave_work, next_pieces

_WORDS_A_TURN = 1 << 15


def reading(parts: Iterator[UInt64], pool: RangePool) -> Callable[[], None]:
    """Reads the next of `parts`, contiguous, at each call."""

    def read() -> None:
        words, counter, sums = next(parts), WorkCounter(pool.threads), list[np.uint64]()
        pool.together(lambda: sums.append(_sum_shared(words, counter.state, _WORDS_A_TURN)), counter)

    return read


@kernel
def _sum_shared(words: UInt64, counter: Int64, size: int) -> np.uint64:
    total = np.uint64(0)
    join_work(counter)
    count = (len(words) + size - 1) // size
    first, last = next_pieces(counter, count)
    while first < last:
        for word in words[first * size : last * size]:
            total += word  # of integers: the compiler may add eight at a time
        first, last = next_pieces(counter, count)
    leave_work(counter)
    return total
