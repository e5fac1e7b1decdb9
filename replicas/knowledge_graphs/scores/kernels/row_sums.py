"""Rows added to rows of a larger array, in the order given."""

from __future__ import annotations

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.native.kernel import kernel

__all__ = ["add_rows"]


@kernel
def add_rows(rows: Float32, places: Int64, parts: Float32) -> None:
    """`rows[places[k]] += parts[k]`, k ascending, so that places may repeat.

    Args:
        rows: float32 `[n, width]`, changed in place.
        places: int64 `[m]`; trusted.
        parts: float32 `[m, width]`.
    """
    for k in range(len(places)):
        row = rows[places[k]]
        part = parts[k]
        for j in range(len(row)):
            row[j] += part[j]
