"""Redis, Valkey and a Cluster keep the store's contract, and what they promise beyond it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.spec import InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import StaleVersion
from elastable.embedding_store.tables.lookup_request import LookupRequest
from elastable.embedding_store.tiers.redis.redis_reader import RedisReader
from elastable.embedding_store.tiers.redis.redis_store import RedisStore
from tests.contracts.store_contract import StoreContract

MakeStore = Callable[[], EmbeddingStore]


def stores(url: str) -> Iterator[MakeStore]:
    """Makes stores that are empty: each in its own namespace."""
    with ExitStack() as stack:
        made = 0

        def make() -> EmbeddingStore:
            nonlocal made
            made += 1
            return stack.enter_context(RedisStore(f"{url}?namespace=test/{made}&partitions=16"))

        yield make


class RedisContract(StoreContract):
    """The store's contract, and what takes the place of lookups that see whole commits unasked."""

    sees_whole_commits = False

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_rows_are_received_in_the_callers_memory(self, store: RedisStore, dtype: str) -> None:
        store.create_table(TableSpec("t", 3, None, dtype=dtype))
        touched = np.arange(50)
        store.commit(Commit(1, {"t": TableUpdate(touched, np.full((50, 3), 2.0, np.float32))}, 0, {}))
        ids = np.array([7, 60, 7, -1, 49])  # there, not there, again; rows of 60 bytes in all
        expected = store.lookup({"t": ids})["t"]
        narrow = np.full((5, 3), np.nan, np.float32)
        assert store.table("t").lookup(ids, out=narrow) is narrow
        np.testing.assert_array_equal(narrow, expected)
        wide = np.full((5, 9), np.nan, np.float32)
        store.lookup_into([LookupRequest("t", ids, wide[:, 2:5])], version=1)
        np.testing.assert_array_equal(wide[:, 2:5], expected)
        assert np.isnan(wide[:, :2]).all()
        assert np.isnan(wide[:, 5:]).all()

    def test_lookups_of_a_version_see_it_exactly(self, store: RedisStore) -> None:
        store.create_table(
            TableSpec("t", 8, 256, initializer=InitializerSpec("zeros"), optimizer=OptimizerSpec.of("sgd"))
        )
        ids, versions = np.arange(256), 30
        done, failures, exact = threading.Event(), list[str](), list[int]()

        def read() -> None:
            with RedisReader(store.url) as reader:
                while not done.is_set():
                    version = reader.version()
                    try:
                        rows = reader.lookup({"t": ids}, version)["t"]
                    except StaleVersion:
                        continue
                    exact.append(version)
                    if (rows != version).any():
                        failures.append(f"version {version} read as {rows.min()} to {rows.max()}")

        readers = [threading.Thread(target=read, daemon=True) for _ in range(2)]
        for reader in readers:
            reader.start()
        try:
            for version in range(1, versions + 1):
                gradients = np.full((256, 8), -1, np.float32)
                store.commit(Commit(version, {"t": TableUpdate(ids, gradients)}, version - 1, {"t": 1.0}))
        finally:
            done.set()
        for reader in readers:
            reader.join(60)
            assert not reader.is_alive()
        assert failures == []
        assert exact != []


class TestOneNode(RedisContract):
    @pytest.fixture
    def make_store(self, redis_url: str) -> Iterator[MakeStore]:
        yield from stores(redis_url)


class TestValkey(RedisContract):
    @pytest.fixture
    def make_store(self, valkey_url: str) -> Iterator[MakeStore]:
        yield from stores(valkey_url)


class TestCluster(RedisContract):
    @pytest.fixture
    def make_store(self, redis_cluster_url: str) -> Iterator[MakeStore]:
        yield from stores(redis_cluster_url)
