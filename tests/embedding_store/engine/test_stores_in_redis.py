"""A store in Redis, in Valkey and in a Cluster keeps the store's contract, however few of its rows are in memory."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from elastable.embedding_store import EmbeddingStore, MemoryStore, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.tier import Tier
from elastable.embedding_store.engine import dense_replay
from elastable.embedding_store.engine.tiered import tiered_rows
from elastable.embedding_store.log.contract import Log
from elastable.embedding_store.optimizers.dense_replay import table_steps as replay_epoch
from elastable.embedding_store.optimizers.dense_replay.table_steps import TableSteps
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from elastable.embedding_store.tiers.redis.streams.redis_log import RedisLog
from tests.contracts.store_contract import StoreContract
from tests.contracts.store_samples import MakeStore, commit, int64, rows_by_id, update
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


class TestStoresInRedis(StoreContract):
    @pytest.fixture(params=[("redis_url", HUGE), ("valkey_url", TINY), ("redis_cluster_url", TINY)], ids=str)
    def make_store(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStore]:
        server, budget = request.param
        monkeypatch.setattr(tiered_rows, "_LEAST_FRAMES", 1)
        with stores(request.getfixturevalue(server), budget) as made:
            yield made

    def test_rows_follow_every_step(self, store: EmbeddingStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """The table remembers few steps: its rows are brought to newer replay epochs all the time, wherever they
        are."""
        monkeypatch.setattr(replay_epoch, "_FEWEST", 8)
        monkeypatch.setattr(dense_replay, "TableSteps", lambda name, form: TableSteps(name, form, most=48))
        dense = OptimizerSpec.of("adamw", lazy=False, weight_decay=0.05)
        with MemoryStore(1) as plain:
            for each in (store, plain):
                assert each.create_table(TableSpec("every", 2, optimizer=dense))
                for number in range(150):
                    ids = np.arange(-number, 200, 2 + number // 3) if number < 20 else int64(number % 7, number)
                    commit(each, {"every": update(ids, 2, number)})
            assert rows_by_id(store, "every") == rows_by_id(plain, "every")
            assert store.table_state("every") == plain.table_state("every")
