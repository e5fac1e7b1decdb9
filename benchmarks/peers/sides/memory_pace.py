"""The pace of memory itself: as many bytes as a lookup reads, read in order by as many threads, and nothing else done.

No lookup of rows that lie anywhere can be faster; what is missing to it is
what their order, their sums and their results cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import Any

import numpy as np

from benchmarks.peers import workloads
from benchmarks.peers.rounds import Turn
from embedding_store.kernel import kernel
from embedding_store.memory.slab import Slab
from embedding_store.range_pool import RangePool
from embedding_store.store import Int64
from embedding_store.turns import Turns, join_turns, leave_turns, next_turns

__all__ = ["prepare"]

_WORDS_A_TURN = 1 << 15  # of 8 bytes


def prepare(race: str, settings: Mapping[str, Any]) -> Turn:
    """`bags`: the bytes of a batch's rows, each time others, until all of the table was read."""
    rows = workloads.bags()[0].size
    table = Slab(workloads.ROWS, workloads.DIM // 2, np.int64).array  # on huge pages, as tables are
    table[:] = 1
    parts = cycle([table[at : at + rows].reshape(-1) for at in range(0, len(table) - rows, rows)])
    pool = RangePool(workloads.THREADS)

    def read() -> None:
        words, turns, sums = next(parts), Turns(workloads.THREADS), list[int]()
        pool.together(lambda: sums.append(_sum_in_turns(words, turns.state, _WORDS_A_TURN)), turns)

    return Turn("memory", read, rows)


@kernel
def _sum_in_turns(words: Int64, turns: Int64, size: int) -> int:
    total = 0
    join_turns(turns)
    count = (len(words) + size - 1) // size
    first, last = next_turns(turns, count)
    while first < last:
        for word in words[first * size : last * size]:
            total += word  # of integers: the compiler may add eight at a time
        first, last = next_turns(turns, count)
    leave_turns(turns)
    return total
