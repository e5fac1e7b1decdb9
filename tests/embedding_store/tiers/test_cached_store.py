"""Cached stores keep the store contract over any store, and never give a row of a wrong version."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import EvictionSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadInput, IdOutOfRange, StaleVersion, StoreFailed, TableNotFound
from elastable.embedding_store.tiers.cached.cached_source import CachedSource
from elastable.embedding_store.tiers.cached.cached_store import CachedStore
from elastable.embedding_store.tiers.files.file_store import FileStore
from elastable.embedding_store.tiers.redis.redis_reader import RedisReader
from elastable.embedding_store.tiers.redis.redis_store import RedisStore
from tests.contracts.store_contract import StoreContract
from tests.contracts.store_samples import JOIN_S, MakeStore, commit, dynamic, fixed, int64, rows_by_id, update
from tests.plugins.seeds import examples

MIB = 1 << 20


class TestCachedMemory(StoreContract):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        return lambda: CachedStore(MemoryStore(threads=2), rows=64, threads=2)


class TestCachedFiles(StoreContract):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> Iterator[MakeStore]:
        with ExitStack() as stack:
            names = iter(range(100))
            yield lambda: stack.enter_context(CachedStore(FileStore(tmp_path / str(next(names)), MIB), bytes=10_000))


class TestCachedRedis(StoreContract):
    @pytest.fixture
    def make_store(self, redis_url: str) -> Iterator[MakeStore]:
        with ExitStack() as stack:
            names = iter(range(100))

            def make() -> EmbeddingStore:
                store = RedisStore(f"{redis_url}?namespace=cached/{next(names)}&partitions=16")
                return stack.enter_context(CachedStore(store, rows=64))

            yield make


SPEC = TableSpec("t", 3, None, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.1))
IDS = st.lists(st.integers(-3, 60) | st.integers(-(2**63), 2**63 - 1), max_size=40)
KINDS = st.sampled_from([*3 * ["lookup"], "commit", "failing", "put", "delete", "clear", "drop", "version"])


@settings(max_examples=examples(80), deadline=None)
@given(st.data(), st.sampled_from([{"rows": 16}, {"rows": 1000}, {"bytes": 2000}]))
def test_cached_equals_uncached_after_anything(data: st.DataObject, size: dict[str, int]) -> None:
    with CachedStore(MemoryStore(threads=1), threads=1, **size) as ours, MemoryStore(threads=1) as theirs:
        both: tuple[EmbeddingStore, ...] = (ours, theirs)
        for store in both:
            store.create_table(SPEC)
        for step, kind in enumerate(data.draw(st.lists(KINDS, max_size=25))):
            ids = np.array(data.draw(IDS), np.int64)
            once = np.unique(ids)
            values = np.random.default_rng(step).normal(size=(len(once), 3)).astype(np.float32)
            for store in both:
                if kind == "commit":
                    version = store.version()
                    store.commit(Commit(version + 1, {"t": TableUpdate(once, values)}, version, {}))
                elif kind == "failing":
                    with pytest.raises(BadInput):
                        commit(store, {"t": TableUpdate(once, values[:, :2])})
                elif kind == "put":
                    store.put("t", [RowBlock(once, values, values)])
                elif kind == "delete":
                    store.delete("t", ids)
                elif kind == "clear":
                    store.clear("t")
                elif kind == "drop":
                    store.drop_table("t")
                    store.create_table(SPEC)
                elif kind == "version":
                    store.reset_version(step)
            asked = data.draw(st.sampled_from([None, theirs.version()]))
            for _ in range(2):
                expected = theirs.lookup({"t": ids}, asked)["t"]
                np.testing.assert_array_equal(ours.unpromoted().lookup({"t": ids}, asked)["t"], expected)
                np.testing.assert_array_equal(ours.lookup({"t": ids}, asked)["t"], expected)
        assert rows_by_id(ours, "t") == rows_by_id(theirs, "t")


def filled(rows: int = 2_000) -> MemoryStore:
    store = MemoryStore(threads=1)
    store.create_table(fixed(size=rows))
    commit(store, {"cities": update(np.arange(rows), 4)})
    return store


class Counting(CachedStore):
    """A cached store that says which rows the store behind was asked for."""

    def __init__(self, store: EmbeddingStore, **size: int) -> None:
        self.asked: list[int] = []
        super().__init__(store, **size)
        lookup = store.lookup

        def counted(ids: dict[str, np.ndarray], version: int | None = None) -> dict[str, np.ndarray]:
            self.asked += [one for some in ids.values() for one in some.tolist()]
            return lookup(ids, version)

        store.lookup = counted  # type: ignore[method-assign, assignment]


def test_hot_rows_are_not_asked_for_again_until_they_change() -> None:
    with Counting(filled(), rows=256) as store:
        hot = np.arange(100, 200)
        for _ in range(3):
            store.lookup({"cities": hot})
        store.asked.clear()
        store.lookup({"cities": np.concatenate((hot, int64(7)))})
        assert store.asked == [7]
        store.asked.clear()
        commit(store, {"cities": update(int64(150, 3), 4)})
        store.lookup({"cities": hot})
        assert store.asked == [150]
        assert (store.hits, store.misses) == (399, 102)


def test_a_scan_of_cold_rows_does_not_wash_hot_ones_out() -> None:
    with Counting(filled(20_000), rows=256) as store:
        hot = np.arange(0, 20_000, 100)
        for _ in range(8):
            store.lookup({"cities": hot})
        held = store.held["cities"]
        for start in range(0, 8_000, 500):
            store.lookup({"cities": np.arange(start, start + 500)})
        store.asked.clear()
        store.lookup({"cities": hot})
        assert held > 150
        assert len(store.asked) < 0.1 * held + (len(hot) - held)


def test_what_leaves_the_cache_alone() -> None:
    with Counting(filled(), rows=64) as store:
        quiet = store.unpromoted()
        for _ in range(5):
            quiet.lookup({"cities": np.arange(50)})
            list(store.scan("cities", 100))
            store.read_rows("cities", np.arange(50))
        commit(store, {"cities": update(np.arange(50), 4)})
        assert store.held == {"cities": 0}
        store.lookup({"cities": np.arange(10)})
        assert store.held == {"cities": 10}
        store.asked.clear()
        quiet.lookup({"cities": np.arange(5, 15)})
        assert store.asked == [10, 11, 12, 13, 14]
        assert store.held == {"cities": 10}
        assert (store.hits, store.misses) == (0, 10)


def test_wrong_ids_are_refused_whether_rows_are_held_or_not() -> None:
    with CachedStore(filled(100), rows=64) as store:
        for _ in range(2):
            store.lookup({"cities": np.arange(10)})
            with pytest.raises(IdOutOfRange, match=r"id 100 at position 1"):
                store.lookup({"cities": int64(5, 100)})
            with pytest.raises(TableNotFound, match="towns"):
                store.lookup({"cities": int64(5), "towns": int64(1)})
            with pytest.raises(StaleVersion):
                store.lookup({"cities": int64(5)}, 0)


def test_evicted_rows_are_held_no_more() -> None:
    with CachedStore(MemoryStore(threads=1), rows=64) as store:
        spec = TableSpec("t", 4, None, eviction=EvictionSpec(max_age=1))
        store.create_table(spec)
        first = store.lookup({"t": int64(1)})["t"]
        commit(store, {"t": update(int64(1), 4)})
        assert (store.lookup({"t": int64(1)})["t"] != first).any()
        for _ in range(2):
            commit(store, {})
        np.testing.assert_array_equal(store.lookup({"t": int64(1)})["t"], first)


def test_a_commit_of_someone_else_is_found_out() -> None:
    behind = filled()
    with CachedStore(behind, rows=2_048) as store:
        store.lookup({"cities": np.arange(100)})
        commit(behind, {"cities": update(np.arange(100), 4)})
        np.testing.assert_array_equal(
            store.lookup({"cities": np.arange(101)})["cities"], behind.lookup({"cities": np.arange(101)})["cities"]
        )
        assert store.held["cities"] <= 101


def test_a_source_that_others_change(redis_url: str) -> None:
    url, ids = f"{redis_url}?namespace=cached-source&partitions=16", np.arange(50)
    with RedisStore(url) as master, CachedSource(RedisReader(url), rows=1_000) as source:
        assert source.specs() == {}
        master.create_table(dynamic())
        for step in range(4):
            commit(master, {"people": update(ids[step::3], 5, step)})
            for version in (None, step + 1, None):
                rows = source.lookup({"people": ids}, version)["people"]
                np.testing.assert_array_equal(rows, master.lookup({"people": ids})["people"])
            assert source.held == {"people": 50}
            with pytest.raises(StaleVersion):
                source.lookup({"people": ids}, step)
        hits = source.hits
        commit(master, {"people": update(int64(7), 5)})
        source.advance(5, {"people": int64(7)})
        assert source.held == {"people": 49}
        np.testing.assert_array_equal(
            source.lookup_when({"people": ids}, 5, 1.0)["people"], master.lookup({"people": ids})["people"]
        )
        assert source.hits == hits + 49
        master.put("people", [RowBlock(int64(7), np.ones((1, 5), np.float32), np.empty((1, 0), np.float32))])
        source.forget()
        assert (source.lookup({"people": int64(7)})["people"] == 1).all()
        commit(master, {"people": update(int64(9), 5)})
        np.testing.assert_array_equal(
            source.lookup_when({"people": ids}, 6, 1.0)["people"], master.lookup({"people": ids})["people"]
        )


@pytest.mark.parametrize("size", [{}, {"rows": 5, "bytes": 5}, {"rows": 0}, {"bytes": -1}])
def test_a_cache_needs_a_size(size: dict[str, int]) -> None:
    with pytest.raises(BadInput, match="either rows or bytes"):
        CachedStore(MemoryStore(threads=1), **size)


def test_bytes_are_shared_out_among_tables() -> None:
    with CachedStore(MemoryStore(threads=1), bytes=50_000) as store:
        for spec in (fixed("small", 4, 100), dynamic("a", 32), dynamic("b", 64)):
            store.create_table(spec)
        ids = np.arange(10_000)
        for _ in range(3):
            store.lookup({"small": ids[:100], "a": ids, "b": ids})
        held = store.held
        assert 80 <= held["small"] <= 100
        assert held["small"] * 16 + held["a"] * 128 + held["b"] * 256 < 60_000
        assert min(held["a"] * 128, held["b"] * 256) > 15_000


def test_a_closed_store_says_so() -> None:
    store = CachedStore(filled(), rows=100)
    store.lookup({"cities": int64(1)})
    store.close()
    store.close()
    with pytest.raises(StoreFailed, match="closed"):
        store.lookup({"cities": int64(1)})


def test_commits_that_hurry_never_make_a_lookup_ask_without_a_version() -> None:
    """Without one, rows of a Redis store may be of two versions."""
    store = filled()
    versions, lookup = list[int | None](), store.lookup

    def asked(ids: dict[str, np.ndarray], version: int | None = None) -> dict[str, np.ndarray]:
        versions.append(version)
        return lookup(ids, version)

    store.lookup = asked  # type: ignore[method-assign, assignment]
    committers = list[threading.Thread]()

    class Hurried(CachedStore):
        """A commit begins whenever a lookup has learned which version stands."""

        def _current(self) -> int:
            at = super()._current()
            committers.append(threading.Thread(target=commit, args=(self, {"cities": update(int64(1), 4)})))
            committers[-1].start()
            committers[-1].join(0.2)  # it must wait for the lookup
            return at

    with Hurried(store, rows=64) as cached:
        cached.lookup({"cities": int64(1, 2)})
        for committer in committers:
            committer.join(JOIN_S)
            assert not committer.is_alive()
    assert versions == [1]
