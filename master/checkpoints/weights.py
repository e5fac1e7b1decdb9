"""Restores the weights of a checkpoint into the store of a job that has continued since."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine import MemoryStore
from elastable.embedding_store.rows.put_weights import put_weights
from elastable.master.checkpoints.checkpoint import Checkpoint

__all__ = ["restore_weights"]


def restore_weights(checkpoint: Checkpoint, store: EmbeddingStore, changed: Callable[[str, Int64], None]) -> None:
    """Every row reads what it read at the version of the checkpoint; slots and the store's version stay.

    Args:
        checkpoint: Of the same job.
        store: Holds its tables; nothing is committed to it meanwhile.
        changed: Called with a table and the ids of rows that were written.

    Raises:
        CheckpointError: a file is damaged; some rows may have been written then.
        StoreFailed, Unavailable: the store failed.
    """
    checkpoint.verify()
    for name, spec in store.specs().items():
        saved = [np.zeros(0, np.int64)]
        for block in checkpoint.rows(name):
            put_weights(store, name, block.ids, block.weights)
            changed(name, block.ids)
            saved.append(block.ids)
        known = np.concatenate(saved)
        for block in store.scan(name):
            since = np.setdiff1d(block.ids, known)
            if len(since):
                put_weights(store, name, since, _untouched(checkpoint, spec, since))
                changed(name, since)
        _restore_decay(checkpoint, store, name)


def _untouched(checkpoint: Checkpoint, spec: TableSpec, ids: Int64) -> Float32:
    """What ids without a row read at the version of the checkpoint."""
    with MemoryStore(threads=1) as empty:
        empty.create_table(spec)
        _restore_decay(checkpoint, empty, spec.name)
        return empty.lookup({spec.name: ids})[spec.name]


def _restore_decay(checkpoint: Checkpoint, store: EmbeddingStore, table: str) -> None:
    """Rows that were never updated have decayed as far as at the version of the checkpoint."""
    state = checkpoint.table_state(table)
    if state.untouched_decay is not None:
        store.put_table_state(table, state)
