"""The file store keeps the store contract, whatever fits into memory, and what it holds outlives it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store.contract.row_data import Commit
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.tables.many_tables import lookup_many
from elastable.embedding_store.tiers.files.file_store import FileStore
from tests.contracts.store_contract import StoreContract
from tests.contracts.store_samples import MakeStore, commit, fixed, int64, rows_by_id, update

MIB = 1 << 20


def stores(home: Path, direct_bytes: int = MIB) -> Iterator[MakeStore]:
    """Makes stores that are empty: each in a folder of its own."""
    with ExitStack() as stack:
        made = 0

        def make() -> EmbeddingStore:
            nonlocal made
            made += 1
            return stack.enter_context(FileStore(home / str(made), MIB, threads=2, direct_bytes=direct_bytes))

        yield make


class TestFileStore(StoreContract):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> Iterator[MakeStore]:
        yield from stores(tmp_path)


class TestFileStoreWithoutDirectRows(StoreContract):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> Iterator[MakeStore]:
        yield from stores(tmp_path, direct_bytes=0)


def wide(name: str = "t", size: int | None = 20_000, dtype: str = "float32") -> TableSpec:
    """A table of which a mebibyte holds about a thousandth."""
    return TableSpec(name, 64, size, dtype, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.1), seed=5)


def some(random: np.random.Generator, size: int, count: int = 4_000) -> np.ndarray:
    """Distinct ids, small ones more often than large ones."""
    return np.unique((size * random.random(count) ** 3).astype(np.int64))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("size", [20_000, None])
def test_rows_beyond_the_budget_are_those_of_a_memory_store(tmp_path: Path, size: int | None, dtype: str) -> None:
    spec, random = wide("t", size, dtype), np.random.default_rng(0)
    with FileStore(tmp_path / "s", MIB, threads=2) as ours, MemoryStore(threads=1) as theirs:
        for store in (ours, theirs):
            store.create_table(spec)
        for step in range(12):
            ids = some(random, 20_000)
            change = update(ids, 64, step)
            for store in (ours, theirs):
                store.commit(Commit(step + 1, {"t": change}, step, {}))
            for _ in range(3):
                ids = (20_000 * random.random(6_000) ** 3).astype(np.int64)
                np.testing.assert_array_equal(ours.lookup({"t": ids})["t"], theirs.lookup({"t": ids})["t"])
            if step == 6:
                ours.delete("t", np.arange(0, 20_000, 7))
                theirs.delete("t", np.arange(0, 20_000, 7))
        assert ours.row_count("t") > 5 * MIB / (2 * 64 * 4)
        assert rows_by_id(ours, "t") == rows_by_id(theirs, "t")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_outside_of_memory_are_read_into_memory_of_any_layout(tmp_path: Path, dtype: str) -> None:
    spec, ids = wide("t", 20_000, dtype), np.random.default_rng(0).integers(0, 20_000, (3_000, 4))
    with FileStore(tmp_path / "s", MIB, threads=2) as ours, MemoryStore(threads=1) as theirs:
        for store in (ours, theirs):
            store.create_table(spec)
            commit(store, {"t": update(np.arange(0, 20_000, 2), 64)})
        buffer = np.full((3_000, 7 + 2 * 64), 7, np.float32)
        lookup_many(2 * [ours.table("t")], [ids[:, 0], ids[:, 1]], out=buffer, prepend_columns=7)
        for column in (0, 1):
            rows = theirs.lookup({"t": np.ascontiguousarray(ids[:, column])})["t"]
            np.testing.assert_array_equal(buffer[:, 7 + 64 * column :][:, :64], rows)
        assert (buffer[:, :7] == 7).all()
        bags = theirs.table("t").lookup(ids, combiner="mean")
        np.testing.assert_array_equal(ours.table("t").lookup(ids, combiner="mean"), bags)


@pytest.mark.parametrize("strategy", ["token", "encoding"])
def test_files_can_be_shards(tmp_path: Path, strategy: str) -> None:
    url = f"{strategy}:file://{tmp_path}/a?budget=1MiB,file://{tmp_path}/b?budget=1MiB"
    with open_store(url) as ours, MemoryStore(threads=1) as theirs:
        for store in (ours, theirs):
            store.create_table(wide())
            for seed in range(2):
                commit(store, {"t": update(np.arange(seed, 20_000, 2), 64, seed)})
        ids = np.random.default_rng(0).integers(0, 20_000, 20_000)
        np.testing.assert_array_equal(ours.lookup({"t": ids})["t"], theirs.lookup({"t": ids})["t"])
    with open_store(url) as ours:
        assert (ours.version(), ours.row_count("t")) == (2, 20_000)


@pytest.mark.parametrize("size", [20_000, None])
def test_a_store_that_was_closed_opens_as_it_was(tmp_path: Path, size: int | None) -> None:
    random = np.random.default_rng(0)
    with FileStore(tmp_path / "s", MIB, threads=1) as store:
        for spec in (wide("t", size), wide("dropped"), fixed()):
            store.create_table(spec)
        for seed in range(3):
            commit(store, {"t": update(some(random, 20_000), 64, seed), "cities": update(int64(5, 9), 4)})
        store.delete("t", np.arange(0, 20_000, 3))
        store.drop_table("dropped")
        expected, specs = rows_by_id(store, "t"), store.specs()
    with FileStore(tmp_path / "s", MIB, threads=1) as store:
        assert (store.version(), store.specs(), store.row_count("cities")) == (3, specs, 2)
        assert rows_by_id(store, "t") == expected
        change = update(np.arange(0, 20_000, 2), 64)
        commit(store, {"t": change})
        expected = rows_by_id(store, "t")
    with FileStore(tmp_path / "s", 64 * MIB, threads=1) as store:
        assert (store.version(), rows_by_id(store, "t")) == (4, expected)
        assert not (tmp_path / "s" / "000002").exists()


def test_flushed_is_durable_and_changed_since_is_refused(tmp_path: Path) -> None:
    """A copy of the folder is what another process would find after this one died."""
    import shutil

    with FileStore(tmp_path / "s", MIB) as store:
        store.create_table(wide())
        commit(store, {"t": update(np.arange(5_000), 64)})
        store.flush()
        shutil.copytree(tmp_path / "s", tmp_path / "flushed")
        commit(store, {"t": update(np.arange(10), 64)})
        shutil.copytree(tmp_path / "s", tmp_path / "changed")
        store.flush()
        store.lookup({"t": np.arange(20_000)})
        expected = rows_by_id(store, "t")
        shutil.copytree(tmp_path / "s", tmp_path / "again")
    with FileStore(tmp_path / "flushed") as store:
        assert (store.version(), store.row_count("t")) == (1, 5_000)
    with FileStore(tmp_path / "again") as store:
        assert (store.version(), rows_by_id(store, "t")) == (2, expected)
    with pytest.raises(StoreFailed, match=r"changed was not closed cleanly.*restore a checkpoint"):
        FileStore(tmp_path / "changed")
    with FileStore(tmp_path / "changed", unclean="drop") as store:
        assert (store.version(), store.specs()) == (0, {})
        store.create_table(wide())
    FileStore(tmp_path / "changed").close()
