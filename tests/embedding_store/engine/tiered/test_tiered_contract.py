"""A store with a tier keeps the store's contract, however few of its rows are in memory."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastable.embedding_store.contract.tier import Tier
from elastable.embedding_store.engine import table_rows
from elastable.embedding_store.log.contract import Log, NoLog
from elastable.embedding_store.log.file_log import FileLog
from elastable.embedding_store.tiers.files.file_tier import FileTier
from elastable.embedding_store.tiers.redis.redis_log import RedisLog
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from tests.contracts.store_contract import StoreContract
from tests.contracts.store_samples import MakeStore
from tests.embedding_store.engine.tiered_stores import tiered_stores
from tests.embedding_store.tiers.dict_tier import DictTier

TINY, HUGE = 1, 1 << 30
KINDS: dict[str, tuple[int, Callable[[Path], tuple[Tier, Log]]]] = {
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
