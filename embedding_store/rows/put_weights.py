"""Rows whose weights are given and whose slots stay."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.rows.fresh_rows import fresh_rows

__all__ = ["put_weights"]


def put_weights(store: EmbeddingStore, table: str, ids: Int64, weights: Float32) -> None:
    """Gives rows other weights; their slots stay, and new rows get those that a first update would find.

    Args:
        store: Nobody commits to it meanwhile.
        table: In the store.
        ids: int64 `[n]`, each once.
        weights: float32 `[n, dim]`.

    Raises:
        TableNotFound, IdOutOfRange, StoreFailed, Unavailable: as of `EmbeddingStore.put`.
    """
    order = np.argsort(ids)
    block = fresh_rows(store.specs()[table], ids[order], weights[order])
    there = store.read_rows(table, block.ids)  # those that have a row
    block.slots[np.searchsorted(block.ids, there.ids)] = there.slots
    store.put(table, [block])
