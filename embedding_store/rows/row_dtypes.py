"""How a table's dtype keeps its weights, and how an update is rounded to it."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.native.numbers.half_numbers import (
    HALF_DTYPES,
    round_half,
    round_half_randomly,
)
from elastable.embedding_store.native.slab import SlabMaker
from elastable.embedding_store.rows.half_rows import HalfRows
from elastable.embedding_store.rows.int8_rows import Int8Rows
from elastable.embedding_store.rows.rounding_bits import rounding_bits
from elastable.embedding_store.rows.row_values import Float32Rows, RowValues

__all__ = ["round_update", "rounded_rows", "row_values"]

_PIECE = 1 << 14  # values that are rounded at a time, for the cache


def row_values(spec: TableSpec, rows: int, new_slab: SlabMaker) -> RowValues:
    """Room for the weights of `rows` rows, kept as `spec.dtype` says."""
    if spec.dtype in HALF_DTYPES:
        return HalfRows(spec, rows, new_slab)
    return (Int8Rows if spec.dtype == "int8" else Float32Rows)(spec, rows, new_slab)


def rounded_rows(dtype: str, weights: Float32) -> Float32:
    """Rows float32 `[n, dim]` rounded to nearest, as a table of that dtype takes them; itself, where nothing is."""
    if dtype not in HALF_DTYPES:
        return weights
    rounded = weights.copy()
    round_half(HALF_DTYPES[dtype], rounded, np.arange(len(rounded)))
    return rounded


def round_update(spec: TableSpec, ids: Int64, step: int, weights: Float32) -> None:
    """Rounds rows to the table's dtype as an update does, in place.

    For rows that were updated outside of their table: what `HalfRows.update`
    would have kept of them, to the bit. float32 rows stay as they are.

    Args:
        spec: The table.
        ids: int64 `[n]`.
        step: Of the update: optimizer steps taken before it.
        weights: float32 `[n, dim]`, C-contiguous.
    """
    if spec.dtype not in HALF_DTYPES:
        return
    many = max(1, _PIECE // spec.dim)
    for start in range(0, len(ids), many):
        piece = slice(start, start + many)
        round_half_randomly(HALF_DTYPES[spec.dtype], weights[piece], rounding_bits(spec, ids[piece], step))
