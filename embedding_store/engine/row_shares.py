"""The rows of several tables, shared out over threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from elastable.embedding_store.native.range_pool import RangePool

__all__ = ["share_rows"]

_PIECE = 1 << 13  # rows that a thread updates in one go: fewer cost more to hand out than to do


def share_rows(pool: RangePool, lengths: Sequence[int], work: Callable[[int, int, int], None]) -> None:
    """Calls `work(table number, start, stop)` for the rows of all tables, in pieces and on several threads.

    Args:
        pool: The threads.
        lengths: Rows of each table.
        work: Is called from several threads, with ranges that do not overlap.
    """
    ends = np.cumsum(lengths).tolist()

    def span(first: int, last: int) -> None:
        for number, (end, length) in enumerate(zip(ends, lengths, strict=True)):
            start, stop = max(first, end - length), min(last, end)
            if start < stop:
                work(number, start - end + length, stop - end + length)

    total = sum(lengths)
    pool.share(span, total, _PIECE if pool.threads > 1 else max(1, total))
