"""Redis, Valkey and a Cluster keep the store's contract, and what they promise beyond it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from embedding_store.redis_store import RedisStore
from embedding_store.store import EmbeddingStore
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


class TestOneNode(StoreContract):
    sees_whole_commits = False

    @pytest.fixture
    def make_store(self, redis_url: str) -> Iterator[MakeStore]:
        yield from stores(redis_url)


class TestValkey(StoreContract):
    sees_whole_commits = False

    @pytest.fixture
    def make_store(self, valkey_url: str) -> Iterator[MakeStore]:
        yield from stores(valkey_url)


class TestCluster(StoreContract):
    sees_whole_commits = False

    @pytest.fixture
    def make_store(self, redis_cluster_url: str) -> Iterator[MakeStore]:
        yield from stores(redis_cluster_url)
