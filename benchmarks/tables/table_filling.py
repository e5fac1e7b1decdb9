"""What benchmarks of tables share: filling all rows, and the memory of this process."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.row_data import RowBlock

_BLOCK = 1 << 16


def filled_blocks(rows: int, dim: int, slots: Float32) -> Iterator[RowBlock]:
    """Blocks of the ids 0 .. rows - 1: weights of ones, and the same `slots` (float32 `[width]`) in every row."""
    for start in range(0, rows, _BLOCK):
        ids = np.arange(start, min(start + _BLOCK, rows))
        yield RowBlock(ids, np.ones((len(ids), dim), np.float32), np.tile(slots, (len(ids), 1)))


def resident_bytes() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
