"""A store with a tier keeps the store's contract, however few of its rows are in memory."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store import EmbeddingStore, MemoryStore, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.tier import Tier
from elastable.embedding_store.engine import dense_replay, table_rows
from elastable.embedding_store.log.contract import Log, NoLog
from elastable.embedding_store.log.file_log import FileLog
from elastable.embedding_store.optimizers.dense_replay import table_steps
from elastable.embedding_store.tiers.files.file_tier import FileTier
from elastable.embedding_store.tiers.redis.redis_log import RedisLog
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from tests.contracts.store_contract import StoreContract
from tests.contracts.store_samples import MakeStore, commit, int64, rows_by_id, update
from tests.embedding_store.engine.tiered_stores import tiered_stores
from tests.embedding_store.tiers.dict_tier import DictTier

TINY, HUGE = 1, 1 << 30
KINDS: dict[str, tuple[int, Callable[[Path], tuple[Tier, Log]]]] = {
    "every row in memory": (HUGE, lambda folder: (DictTier(), FileLog(folder))),
    "few rows in memory": (TINY, lambda folder: (DictTier(), NoLog())),
    "the rest in files": (TINY, lambda at: (FileTier(at / "rows", fsync=False), FileLog(at / "log", fsync="never"))),
}


class TestTieredStores(StoreContract):
    @pytest.fixture(params=KINDS)
    def make_store(
        self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[MakeStore]:
        budget, make = KINDS[request.param]
        monkeypatch.setattr(table_rows, "_LEAST_FRAMES", 1)
        with tiered_stores(lambda number: make(tmp_path / str(number)), budget) as stores:
            yield stores


class TestStoresInRedis(StoreContract):
    @pytest.fixture(params=[("redis_url", HUGE), ("valkey_url", TINY), ("redis_cluster_url", TINY)], ids=str)
    def make_store(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStore]:
        server, budget = request.param
        url = request.getfixturevalue(server)
        monkeypatch.setattr(table_rows, "_LEAST_FRAMES", 1)
        with ExitStack() as places:

            def make(number: int) -> tuple[Tier, Log]:
                place = RedisPlace(f"{url}?namespace=test/{number}&partitions=4")
                places.callback(place.close)
                return RedisTier(place), RedisLog(place)

            yield places.enter_context(tiered_stores(make, budget))

    def test_rows_follow_every_step(self, store: EmbeddingStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(table_steps, "_FEWEST", 8)
        few_steps = partial(table_steps.TableSteps, most=48)  # rows are brought to newer replay epochs all the time
        monkeypatch.setattr(dense_replay, "TableSteps", few_steps)
        dense = OptimizerSpec.of("adamw", lazy=False, weight_decay=0.05)
        with MemoryStore(1) as plain:
            for each in (store, plain):
                assert each.create_table(TableSpec("every", 2, optimizer=dense))
                for number in range(150):
                    ids = np.arange(-number, 200, 2 + number // 3) if number < 20 else int64(number % 7, number)
                    commit(each, {"every": update(ids, 2, number)})
            assert rows_by_id(store, "every") == rows_by_id(plain, "every")
            assert store.table_state("every") == plain.table_state("every")
