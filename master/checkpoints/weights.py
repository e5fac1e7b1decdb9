"""The weights of a checkpoint put back into the store of a job that has gone on since."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.optimizers.registry import follows_steps, row_optimizer
from elastable.embedding_store.rows.put_weights import put_weights
from elastable.master.checkpoints.checkpoint import Checkpoint

__all__ = ["restore_weights"]


def restore_weights(checkpoint: Checkpoint, store: EmbeddingStore, changed: Callable[[str, Int64], None]) -> None:
    """Every row reads what it read at the version of the checkpoint; slots and the store's version stay.

    Args:
        checkpoint: Of the same job.
        store: Holds its tables; nobody commits to it meanwhile.
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
        counters = checkpoint.sightings(name)
        if counters is not None and _decays(spec):
            store.put_sightings(name, counters)  # what decay has made of rows that were never updated


def _untouched(checkpoint: Checkpoint, spec: TableSpec, ids: Int64) -> Float32:
    """What ids without a row read at the version of the checkpoint."""
    with MemoryStore(threads=1) as empty:
        empty.create_table(spec)
        counters = checkpoint.sightings(spec.name)
        if counters is not None and _decays(spec):
            empty.put_sightings(spec.name, counters)
        return empty.lookup({spec.name: ids})[spec.name]


def _decays(spec: TableSpec) -> bool:
    form = row_optimizer(spec.optimizer).dense_form if follows_steps(spec.optimizer) else None
    return form is not None and form.decay != 0
