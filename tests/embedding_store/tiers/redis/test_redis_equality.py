"""Rows in memory, on one server and on a Cluster are the same to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.spec import InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.open_store import open_reader
from tests.embedding_store.tiers.redis.redis_stores import redis_store

pytestmark = pytest.mark.process

SPECS = (
    TableSpec("adagrad", 5, None, initializer=InitializerSpec("normal", 0.0, 0.1), seed=3,
              optimizer=OptimizerSpec.of("adagrad", learning_rate=0.05)),
    TableSpec("adam", 16, 3_000, optimizer=OptimizerSpec.of("adam", learning_rate=0.01)),
    TableSpec("nesterov", 8, None, optimizer=OptimizerSpec.of("sgd", momentum=0.9, nesterov=1)),
)  # fmt: skip
COMMITS = 50

Rows = dict[tuple[str, int], tuple[bytes, bytes]]


def train(store: EmbeddingStore, begin: int, end: int) -> None:
    """The commits `begin` to `end`, both included."""
    for version in range(begin, end + 1):
        random = np.random.default_rng([42, version])
        updates = {}
        for spec in SPECS[: random.integers(1, len(SPECS) + 1)]:
            ids = np.unique(random.integers(0, 3_000, 150))
            ids = random.permutation(ids if spec.vocabulary_size else ids * 2**50 - 2**60)
            updates[spec.name] = TableUpdate(ids, random.normal(size=(len(ids), spec.dim)).astype(np.float32))
        rates = {spec.name: 0.1 / version for spec in SPECS[:1]}
        store.commit(Commit(version, updates, version - 1, rates))


def everything(store: EmbeddingStore) -> Rows:
    return {
        (spec.name, int(one)): (weights.tobytes(), slots.tobytes())
        for spec in SPECS
        for block in store.scan(spec.name, 1_000)
        for one, weights, slots in zip(block.ids, block.weights, block.slots, strict=True)
    }


@pytest.fixture(scope="module")
def in_memory() -> Rows:
    with MemoryStore(threads=2) as store:
        for spec in SPECS:
            store.create_table(spec)
        train(store, 1, COMMITS)
        rows = everything(store)
        assert len(rows) > 5_000
        return rows


@pytest.mark.parametrize("where", ["redis_url", "valkey_url", "redis_cluster_url"])
def test_the_same_bits(request: pytest.FixtureRequest, in_memory: Rows, where: str) -> None:
    """Also where a second process goes on in the middle, with the rows that the first one wrote, and a reader's."""
    url = request.getfixturevalue(where)
    with redis_store(url) as store:
        for spec in SPECS:
            store.create_table(spec)
        train(store, 1, COMMITS // 2)
    with redis_store(f"{url}?budget=1MiB") as store:
        train(store, COMMITS // 2 + 1, COMMITS)
        assert everything(store) == in_memory
        assert store.version() == COMMITS
        store.flush()
        with open_reader(url) as reader:
            for spec in SPECS:
                ids = np.array([one for name, one in in_memory if name == spec.name], np.int64)
                rows = reader.lookup({spec.name: ids})[spec.name]
                assert [row.tobytes() for row in rows] == [in_memory[spec.name, one][0] for one in ids.tolist()]
