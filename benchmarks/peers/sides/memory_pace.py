"""The memory ceiling: reads as many bytes as a lookup."""

from collections.abc import Mapping
from itertools import cycle

import numpy as np

from benchmarks.memory_pace import reading
from benchmarks.peers import workloads
from benchmarks.peers.rounds import Turn
from elastable.embedding_store.native.range_pool import RangePool
from elastable.embedding_store.native.slab import Slab


def prepare(race: str, settings: Mapping[str, object]) -> Turn:
    """`bags`: the bytes of a batch's rows, each time others, until all of the table was read."""
    rows = workloads.bags()[0].size
    table = Slab(workloads.ROWS, workloads.DIM // 2, np.uint64).array  # on huge pages, as tables are
    table[:] = 1
    parts = cycle([table[at : at + rows].reshape(-1) for at in range(0, len(table) - rows, rows)])
    return Turn("memory", reading(parts, RangePool(workloads.THREADS)), rows)
