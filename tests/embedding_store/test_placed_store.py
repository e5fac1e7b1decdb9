"""Tables in several stores, at one version."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from elastable.embedding_store.errors import BadInput, StoreFailed, TableNotFound, Unavailable
from elastable.embedding_store.initial_values import initial_rows
from elastable.embedding_store.memory.store import MemoryStore
from elastable.embedding_store.placed_store import PlacedStore
from elastable.embedding_store.redis.store import RedisStore
from elastable.embedding_store.store import Commit
from tests.contracts.store_contract import StoreContract
from tests.contracts.store_samples import MakeStore, commit, dynamic, fixed, int64, update


class TestPlacedStore(StoreContract):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        places = {"cities": "file", "t": "memory"}
        return lambda: PlacedStore({"memory": MemoryStore(2), "file": MemoryStore(1)}, places, default="memory")


class TestMemoryAndRedis(StoreContract):
    sees_whole_commits = True

    @pytest.fixture
    def make_store(self, redis_url: str) -> Iterator[MakeStore]:
        made = 0

        def make() -> PlacedStore:
            nonlocal made
            made += 1
            redis = RedisStore(f"{redis_url}?namespace=placed{made}")
            return PlacedStore(
                {"memory": MemoryStore(2), "redis": redis}, {"cities": "redis", "t": "redis"}, default="memory"
            )

        return make


class Failing(MemoryStore):
    """Fails the second half of its commits as often as told."""

    failures = 0

    def commit(self, commit: Commit) -> None:
        if self.failures:
            self.failures -= 1
            raise Unavailable("gone for a moment")
        super().commit(commit)

    def stage(self, commit: Commit):  # type: ignore[no-untyped-def]
        super().stage(commit)
        return lambda: self.commit(commit)


def test_tables_are_where_they_were_placed() -> None:
    memory, file = MemoryStore(), MemoryStore()
    with PlacedStore({"memory": memory, "file": file}, {"large": "file"}, default="memory") as store:
        store.create_table(fixed("large", 4))
        store.create_table(dynamic("small", 2))
        assert list(memory.specs()) == ["small"]
        assert list(file.specs()) == ["large"]
        assert set(store.specs()) == {"small", "large"}
        assert (store.place("large"), store.place("small")) == ("file", "memory")
        commit(store, {"large": update(int64(1), 4)})
        assert (memory.version(), file.version(), store.version()) == (1, 1, 1)


def test_a_commit_that_failed_in_one_place_is_repeated_there_alone() -> None:
    memory, redis = MemoryStore(), Failing()
    store = PlacedStore({"redis": redis, "memory": memory}, {"r": "redis", "m": "memory"}, default="memory")
    specs = {"r": fixed("r", 4), "m": fixed("m", 4)}
    for spec in specs.values():
        store.create_table(spec)
    # Redis is asked first: as long as it fails, memory has changed nothing.
    redis.failures = 1
    step = Commit(1, {"r": update(int64(1, 2), 4), "m": update(int64(1, 2), 4)}, 0, {})
    with pytest.raises(Unavailable):
        store.commit(step)
    assert (redis.version(), memory.version()) == (0, 0)
    store.commit(step)
    once = store.lookup({"r": int64(1, 2), "m": int64(1, 2)}, version=1)
    for name, spec in specs.items():
        assert not np.array_equal(once[name], initial_rows(spec, int64(1, 2)))
    # A half that was done is not done again, and is not shown.
    second = Commit(2, {"r": update(int64(1), 4), "m": update(int64(1), 4)}, 1, {})
    redis.commit(Commit(2, {"r": update(int64(1), 4)}, 1, {}))
    with pytest.raises(StoreFailed, match=r"a commit is half done .*redis at 2"):
        store.lookup({"m": int64(1)})
    assert store.version() == 1
    store.commit(second)
    assert (redis.version(), memory.version(), store.version()) == (2, 2, 2)


def test_what_one_place_refuses_changes_nothing_anywhere() -> None:
    memory, file = MemoryStore(), MemoryStore()
    store = PlacedStore({"memory": memory, "file": file}, {"large": "file"}, default="memory")
    store.create_table(fixed("large", 4, size=10))
    store.create_table(fixed("small", 4, size=10))
    with pytest.raises(BadInput, match="small"):
        store.commit(Commit(1, {"large": update(int64(1), 4), "small": update(int64(10), 4)}, 0, {}))
    assert (memory.version(), file.version(), file.row_count("large")) == (0, 0, 0)
    with pytest.raises(TableNotFound, match="nothing"):
        store.commit(Commit(1, {"nothing": update(int64(1), 4)}, 0, {}))


def test_a_place_without_a_store_is_refused() -> None:
    with pytest.raises(BadInput, match=r"'tape'.*memory"):
        PlacedStore({"memory": MemoryStore()}, {"t": "tape"}, default="memory")
