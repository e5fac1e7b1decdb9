"""Rows that come from somewhere else: their values are given, their slots begin anew."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.optimizers.registry import row_optimizer

__all__ = ["fresh_rows"]


def fresh_rows(spec: TableSpec, ids: Int64, weights: Float32) -> RowBlock:
    """A block of rows with the slots that a first update would find.

    Args:
        spec: The table.
        ids: int64 `[n]`, each once.
        weights: float32 `[n, dim]`.
    """
    slots = row_optimizer(spec.optimizer).initial_slots(spec.dim)
    return RowBlock(ids, weights, np.repeat(slots[np.newaxis], len(ids), axis=0))
