"""Checkpoints of tables whose rows follow every step: whole each time, as every row changes with every step."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from elastable.embedding_store import Commit, MemoryStore, OptimizerSpec, PartitionedStore, TableSpec, TableUpdate
from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.checkpoints.restoring import restore_tables
from elastable.master.checkpoints.series import CheckpointSeries
from tests.master.checkpoints.jobs import JOB, dense_of, progress_of

IDS = np.arange(20)
SPEC = TableSpec("t", 4, 20, optimizer=OptimizerSpec.of("adamw", lazy=False, learning_rate=0.01, weight_decay=0.1))


def step(store: EmbeddingStore) -> dict[str, TableUpdate]:
    version = store.version()
    random = np.random.default_rng(version)
    ids = random.choice(15, 2, replace=False)
    updates = {"t": TableUpdate(ids, random.normal(size=(2, 4)).astype(np.float32))}
    store.commit(Commit(version + 1, updates, version, {}))
    return updates


def rows(store: EmbeddingStore) -> Float32:
    return store.lookup({"t": IDS})["t"]


def test_increments_restore_the_version_that_they_are_of(tmp_path: Path) -> None:
    with MemoryStore() as store:
        store.create_table(SPEC)
        series = CheckpointSeries(tmp_path, store, keep=0, full_every=4)
        for _ in range(3):
            for _ in range(7):
                series.committed(step(store), store.version())
            version, pin = store.version(), store.pin()
            finish = series.begin(pin, dense_of(version), JOB, progress_of(version))
            expected = rows(store)
            series.committed(step(store), store.version())  # training goes on while it is written
            checkpoint = open_checkpoint(finish())
            pin.close()
            for other in (MemoryStore(), PartitionedStore([MemoryStore(), MemoryStore()], "encoding")):
                with other:
                    restore_tables(checkpoint, other)
                    assert np.array_equal(rows(other), expected)
                    step(other)
                    assert np.allclose(rows(other), rows(store), rtol=1e-6, atol=1e-7)
