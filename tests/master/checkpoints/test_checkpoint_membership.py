"""A checkpoint holds who was sighted and who was touched: a restored job evicts and admits as if it had gone on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store.composite import PartitionedStore
from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.spec import AdmissionSpec, EvictionSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine import MemoryStore
from elastable.master.api import JobSpec
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.checkpoints.restoring import restore_tables
from elastable.master.checkpoints.writing import write_checkpoint
from elastable.master.tasks.progress import Progress

SPECS = (
    TableSpec("aged", 2, optimizer=OptimizerSpec.of("adagrad"), eviction=EvictionSpec(max_age=3, min_frequency=1)),
    TableSpec("seen", 2, optimizer=OptimizerSpec.of("adagrad"), admission=AdmissionSpec(3, 1 << 12)),
    TableSpec("plain", 2, optimizer=OptimizerSpec.of("adagrad")),
    TableSpec("timed", 2, optimizer=OptimizerSpec.of("adagrad"), eviction=EvictionSpec(ttl=2.0)),
)


def train(store: EmbeddingStore, versions: int) -> None:
    for version in range(store.version(), store.version() + versions):
        random = np.random.default_rng(version)
        ids = np.unique(random.integers(-30, 30, 12))
        gradients = random.normal(size=(len(ids), 2)).astype(np.float32)
        updates = {spec.name: TableUpdate(ids, gradients) for spec in SPECS}
        store.commit(Commit(version + 1, updates, version, {}, time=1000.0 + 0.75 * version))


def rows(store: EmbeddingStore) -> dict[tuple[str, int], tuple[bytes, bytes]]:
    return {
        (spec.name, int(one)): (weights.tobytes(), slots.tobytes())
        for spec in SPECS
        for block in store.scan(spec.name)
        for one, weights, slots in zip(block.ids, block.weights, block.slots, strict=True)
    }


def restored(path: Path, store: EmbeddingStore) -> EmbeddingStore:
    restore_tables(open_checkpoint(path), store)
    return store


def shards(count: int, strategy: str) -> PartitionedStore:
    return PartitionedStore([MemoryStore(threads=1) for _ in range(count)], strategy)


@pytest.mark.parametrize("version", [1, 4, 7])
def test_a_restored_job_goes_on_as_if_nothing_had_happened(tmp_path: Path, version: int) -> None:
    with MemoryStore() as store:
        for spec in SPECS:
            store.create_table(spec)
        train(store, version)
        write_checkpoint(tmp_path, store, {}, JobSpec(job="j"), Progress(version))
        before = rows(store)
        train(store, 8)
        targets = [MemoryStore(), shards(2, "token"), shards(2, "encoding"), shards(3, "token")]
        for target in targets:
            with restored(tmp_path, target) as other:
                assert rows(other) == before
                train(other, 8)
                assert rows(other) == rows(store)


def test_shards_are_restored_to_one_and_to_more(tmp_path: Path) -> None:
    with shards(2, "token") as store:
        for spec in SPECS:
            store.create_table(spec)
        train(store, 5)
        write_checkpoint(tmp_path, store, {}, JobSpec(job="j"), Progress(5))
        train(store, 6)
        for target in (MemoryStore(), shards(3, "token"), shards(2, "encoding")):
            with restored(tmp_path, target) as other:
                train(other, 6)
                assert rows(other) == rows(store)
