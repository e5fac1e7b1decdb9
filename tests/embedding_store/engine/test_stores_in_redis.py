"""A store in Redis, in Valkey and in a Cluster keeps the store's contract, however few of its rows are in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import redis

from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.spec import EvictionSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.contract.tier import Tier
from elastable.embedding_store.engine.dense_replay import table_replay
from elastable.embedding_store.engine.frames import rows_in_memory
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.engine.unindexed.tier_directory import TierDirectory
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.log.contract import Log
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.optimizers.dense_replay import chapter
from elastable.embedding_store.optimizers.dense_replay.table_steps import TableSteps
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from elastable.embedding_store.tiers.redis.streams.redis_log import RedisLog
from tests.contracts.store_contract import StoreContract
from tests.contracts.store_samples import MakeStore, commit, fixed, int64, rows_by_id, update
from tests.embedding_store.engine.tiered_stores import tiered_stores

TINY, HUGE = 1, 1 << 30


@contextmanager
def stores(url: str, budget: int, indexed: bool = True) -> Iterator[Callable[[], EmbeddingStore]]:
    """Makes empty stores, each in its own namespace."""
    with ExitStack() as places:

        def make(number: int) -> tuple[Tier, Log]:
            place = RedisPlace(f"{url}?namespace=test/{number}&partitions=4")
            places.callback(place.close)
            return RedisTier(place), RedisLog(place)

        with tiered_stores(make, budget, indexed) as made:
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


class TestIndexInRedis(StoreContract):
    @pytest.fixture
    def make_store(self, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStore]:
        monkeypatch.setattr(rows_in_memory, "_LEAST_FRAMES", 1)
        with stores(redis_url, TINY, indexed=False) as made:
            yield made

    def test_rows_follow_every_step(self, store: EmbeddingStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """The table remembers few steps: its rows are brought to newer chapters all the time, wherever they are."""
        monkeypatch.setattr(chapter, "_FEWEST", 8)
        monkeypatch.setattr(table_replay, "TableSteps", lambda name, form: TableSteps(name, form, most=48))
        dense = OptimizerSpec.of("adamw", lazy=False, weight_decay=0.05)
        with MemoryStore(1) as plain:
            for each in (store, plain):
                assert each.create_table(TableSpec("every", 2, optimizer=dense))
                for number in range(150):
                    ids = np.arange(-number, 200, 2 + number // 3) if number < 20 else int64(number % 7, number)
                    commit(each, {"every": update(ids, 2, number)})
            assert rows_by_id(store, "every") == rows_by_id(plain, "every")
            assert store.table_state("every") == plain.table_state("every")


class TestIndexInACluster(TestIndexInRedis):
    @pytest.fixture
    def make_store(self, redis_cluster_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStore]:
        monkeypatch.setattr(rows_in_memory, "_LEAST_FRAMES", 1)
        with stores(redis_cluster_url, TINY, indexed=False) as made:
            yield made


def test_a_cold_row_takes_no_memory_where_the_index_is_in_redis(redis_url: str) -> None:
    """Whatever the number of rows, the process keeps only what the budget holds; and every row reads as it was put."""
    rows, dim, budget = 60_000, 4, 1 << 20
    values = np.random.default_rng(5).normal(size=(rows, dim)).astype(np.float32)
    ids = np.random.default_rng(6).permutation(np.arange(-rows, rows, 2))
    held: dict[str, int] = {}
    for index in ("memory", "redis"):
        with open_store(f"{redis_url}?namespace={index}&budget=1MiB&index={index}", threads=1) as store:
            assert isinstance(store, MemoryStore)
            assert store.create_table(TableSpec("people", dim))
            for start in range(0, rows, 5_000):
                some = slice(start, start + 5_000)
                store.put("people", [RowBlock(ids[some], values[some], np.empty((5_000, 0), np.float32))])
            store.flush()
            assert store.row_count("people") == rows
            np.testing.assert_array_equal(store.lookup({"people": ids[::7]})["people"], values[::7])
        with open_store(f"{redis_url}?namespace={index}&budget=1MiB&index={index}", threads=1) as store:
            assert isinstance(store, MemoryStore)
            assert store.row_count("people") == rows
            directory = store._tables["people"]._directory
            held[index] = directory.bytes
            for start in range(0, rows, 5_000):  # every row was cold; some are in memory afterwards
                some = slice(start, start + 5_000)
                np.testing.assert_array_equal(store.lookup({"people": ids[some]})["people"], values[some])
            if index == "redis":
                assert isinstance(directory, TierDirectory)
                assert directory.in_memory * 16 <= budget
            assert sorted(i for block in store.scan("people") for i in block.ids.tolist()) == sorted(ids.tolist())
    assert held["memory"] > 16 * rows
    assert held["redis"] < 200_000  # as empty: three indexes without ids


def test_a_store_is_opened_with_the_index_in_memory_or_in_redis(redis_url: str) -> None:
    """Redis holds the same, so a store may be opened with one and then with the other; files are found by positions."""
    rows = {}
    for index in ("memory", "redis", "memory", "redis"):
        with open_store(f"{redis_url}?index={index}", threads=1) as store:
            store.create_table(fixed())
            commit(store, {"cities": update(np.arange(store.version(), 90, 7), 4, store.version())})
            rows = rows_by_id(store, "cities")
            count = store.row_count("cities")
            assert count == len(rows)
    with open_store("memory", threads=1) as plain:
        plain.create_table(fixed())
        for _ in range(4):
            commit(plain, {"cities": update(np.arange(plain.version(), 90, 7), 4, plain.version())})
        assert rows_by_id(plain, "cities") == rows


def test_only_redis_can_keep_the_index(tmp_path: Path, redis_url: str) -> None:
    with pytest.raises(BadInput, match="index=redis is for tables in Redis"):
        open_store(f"file://{tmp_path}/rows?index=redis")
    with pytest.raises(BadInput, match="index=disk: write index=memory or index=redis"):
        open_store(f"{redis_url}?index=disk")


EVICTING = TableSpec("evicts", 2, eviction=EvictionSpec(max_age=9, max_rows=150, every=2))


def test_tables_with_eviction_are_opened_with_one_index_and_then_with_the_other(redis_url: str) -> None:
    """Ranks are kept where they are needed, made where they are missing, and never older than the rows."""
    random = np.random.default_rng(3)
    with MemoryStore(1) as plain, redis.Redis.from_url(redis_url) as client:
        plain.create_table(EVICTING)
        for index in ("memory", "redis", "redis", "memory", "redis", "memory"):
            with open_store(f"{redis_url}?index={index}&budget=1MiB&partitions=4", threads=1) as store:
                assert isinstance(store, MemoryStore)
                store.create_table(EVICTING)
                for _ in range(7):
                    ids = np.unique(random.integers(-300, 300, 40))
                    for each in (store, plain):
                        commit(each, {"evicts": update(ids, 2, plain.version())})
                assert rows_by_id(store, "evicts") == rows_by_id(plain, "evicts")
                store.flush()
            held = [key for key in client.scan_iter() if key.endswith(b":ranks")]
            assert len(held) == (4 if index == "redis" else 0)
            rows = [client.hlen(f"{{elastable:evicts:{partition}}}:rows") for partition in range(4)]
            assert [client.zcard(key) for key in sorted(held)] == (rows if held else [])


def test_cold_rows_are_evicted_from_redis(redis_url: str) -> None:
    """Nobody reads them for that, but for a pinned version."""
    rows, dim = 40_000, 4
    spec = TableSpec("people", dim, eviction=EvictionSpec(max_rows=rows - 1_000, every=2))
    with open_store(f"{redis_url}?budget=1MiB&index=redis", threads=1) as store:
        assert isinstance(store, MemoryStore)
        store.create_table(spec)
        for start in range(0, rows, 5_000):
            ids = np.arange(start, start + 5_000)
            touches = np.stack((ids, np.zeros_like(ids)), axis=1)
            weights, slots = np.ones((len(ids), dim), np.float32), np.empty((len(ids), 0), np.float32)
            store.put("people", [RowBlock(ids, weights, slots, touches)])
        store.flush()
        store.reset_version(rows)
    with open_store(f"{redis_url}?budget=1MiB&index=redis", threads=1) as store:
        assert isinstance(store, MemoryStore)
        store.reset_version(rows + 1)
        asked = store.measures().rows_read["people"]
        commit(store, {})
        assert store.row_count("people") == rows - 1_000
        assert store.measures().rows_read["people"] == asked
        left = np.concatenate([block.ids for block in store.scan("people")])
        np.testing.assert_array_equal(np.sort(left), np.arange(1_000, rows))
        with store.pin() as pin:
            ids = np.arange(rows, rows + 500)
            commit(store, {})
            commit(store, {"people": update(ids, dim)})
            assert store.row_count("people") == rows - 1_000
            assert pin.row_count("people") == rows - 1_000
            assert sum(len(block.ids) for block in pin.scan("people")) == rows - 1_000
            assert (pin.lookup({"people": np.arange(1_000, 1_500)})["people"] == 1).all()
        store.flush()
        with redis.Redis.from_url(redis_url) as client:
            held = sum(client.zcard(f"{{elastable:people:{partition}}}:ranks") - 1 for partition in range(64))
        assert held == rows - 1_000
