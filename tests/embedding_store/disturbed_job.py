"""One small job of three tables, to be disturbed and compared with an undisturbed run."""

import numpy as np

from elastable.embedding_store import Commit, EmbeddingStore, MemoryStore, TableUpdate
from elastable.embedding_store.contract.spec import InitializerSpec, OptimizerSpec, TableSpec
from tests.contracts.store_samples import create_tables, rows_by_id

SPECS = {
    "adam": TableSpec("adam", 6, None, optimizer=OptimizerSpec.of("adam", learning_rate=0.1)),
    "adagrad": TableSpec("adagrad", 3, 10_000, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.1)),
    "sgd": TableSpec("sgd", 5, None, initializer=InitializerSpec("normal", 0.0, 1.0)),
}
IDS = np.arange(200, dtype=np.int64)


def commit_of(version: int, tables: tuple[str, ...] = ("adam", "adagrad", "sgd")) -> Commit:
    """Half of the ids of each table, at random, the same for every store."""
    random = np.random.default_rng(version)
    updates = {}
    for name in tables:
        ids = random.permutation(IDS)[:100]
        updates[name] = TableUpdate(ids, random.normal(size=(100, SPECS[name].dim)).astype(np.float32))
    return Commit(version, updates, version - 1, {})


def everything(store: EmbeddingStore) -> dict[str, dict[int, tuple[bytes, bytes]]]:
    return {name: rows_by_id(store, name) for name in SPECS}


def undisturbed(versions: int) -> MemoryStore:
    store = create_tables(MemoryStore(threads=1), *SPECS.values())
    for version in range(1, versions + 1):
        store.commit(commit_of(version))
    return store
