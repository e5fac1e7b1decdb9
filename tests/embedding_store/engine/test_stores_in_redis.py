"""A store in Redis, in Valkey and in a Cluster keeps the store's contract, however few of its rows are in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.contract.tier import Tier
from elastable.embedding_store.engine.frames import rows_in_memory
from elastable.embedding_store.log.contract import Log
from elastable.embedding_store.tiers.redis.redis_log import RedisLog
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from tests.contracts.store_contract import StoreContract
from tests.contracts.store_samples import MakeStore
from tests.embedding_store.engine.tiered_stores import tiered_stores

TINY, HUGE = 1, 1 << 30


@contextmanager
def stores(url: str, budget: int) -> Iterator[Callable[[], EmbeddingStore]]:
    """Makes empty stores, each in its own namespace."""
    with ExitStack() as places:

        def make(number: int) -> tuple[Tier, Log]:
            place = RedisPlace(f"{url}?namespace=test/{number}&partitions=4")
            places.callback(place.close)
            return RedisTier(place), RedisLog(place)

        with tiered_stores(make, budget) as made:
            yield made


class TestEveryRowInMemory(StoreContract):
    @pytest.fixture
    def make_store(self, redis_url: str) -> Iterator[MakeStore]:
        with stores(redis_url, HUGE) as made:
            yield made


class TestFewRowsInMemory(StoreContract):
    @pytest.fixture
    def make_store(self, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStore]:
        monkeypatch.setattr(rows_in_memory, "_LEAST_FRAMES", 1)
        with stores(valkey_url, TINY) as made:
            yield made


class TestFewRowsInMemoryAndACluster(StoreContract):
    @pytest.fixture
    def make_store(self, redis_cluster_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStore]:
        monkeypatch.setattr(rows_in_memory, "_LEAST_FRAMES", 1)
        with stores(redis_cluster_url, TINY) as made:
            yield made
