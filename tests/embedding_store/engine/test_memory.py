"""The memory store keeps the store contract, and is equal to a dictionary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.engine.store_history import StoreHistory
from elastable.embedding_store.errors import BadSpec, StoreFailed
from elastable.embedding_store.tables.initial_values import initial_rows
from tests.contracts.reference_rows import row_step
from tests.contracts.store_contract import StoreContract
from tests.contracts.store_samples import MakeStore, rows_by_id

DIM = 3


class Behind(MemoryStore):
    """A store whose commits are logged on another thread."""

    def commit(self, commit: Commit) -> None:
        self.begin_commit(commit).result()

    def _show_ahead(self, version: int) -> bool:
        return True


def logged(folder: Path) -> MemoryStore:
    store = Behind(threads=2)
    store.keep_history(StoreHistory(folder / uuid4().hex))
    return store


STORES: dict[str, Callable[[Path], MemoryStore]] = {
    "direct": lambda folder: MemoryStore(threads=2),
    "indexed": lambda folder: MemoryStore(threads=1, direct_bytes=0),
    "logged": logged,
}


class TestMemoryStores(StoreContract):
    @pytest.fixture(params=STORES)
    def make_store(self, request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
        return partial(STORES[request.param], tmp_path)


@dataclass
class Model:
    """A table as a dictionary: id -> (weights, accumulator)."""

    spec: TableSpec
    rows: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def row(self, one: int) -> tuple[np.ndarray, np.ndarray | None]:
        return self.rows.get(one) or (initial_rows(self.spec, np.array([one]))[0], None)

    def lookup(self, ids: np.ndarray) -> np.ndarray:
        return np.array([self.row(one)[0] for one in ids.tolist()], np.float32).reshape(-1, self.spec.dim)

    def commit(self, update: TableUpdate, step: int) -> None:
        for one, gradient in zip(update.ids.tolist(), update.gradients, strict=True):
            self.rows[one] = row_step(OPTIMIZER)(*self.row(one), gradient, step)


OPTIMIZER = OptimizerSpec.of("adagrad", learning_rate=0.1)
SMALL_IDS = st.lists(st.integers(0, 129), max_size=40)
ANY_IDS = st.lists(st.integers(-5, 129) | st.integers(-(2**63), 2**63 - 1), max_size=40)
KINDS = st.sampled_from(["commit", "commit", "lookup", "scan and put", "clear"])


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(["direct", "indexed", "dynamic"]))
def test_any_sequence_of_operations_equals_a_dictionary(data: st.DataObject, layout: str) -> None:
    spec = TableSpec("t", DIM, None if layout == "dynamic" else 130, optimizer=OPTIMIZER)
    ids_of = ANY_IDS if layout == "dynamic" else SMALL_IDS
    model = Model(spec)
    with MemoryStore(threads=1, direct_bytes=0 if layout == "indexed" else 1 << 20) as store:
        store.create_table(spec)
        for kind in data.draw(st.lists(KINDS, max_size=10)):
            ids = np.array(data.draw(ids_of), np.int64)
            if kind == "commit":
                once = np.unique(ids)
                gradients = np.random.default_rng(len(once)).normal(size=(len(once), DIM)).astype(np.float32)
                update = TableUpdate(once, gradients)
                model.commit(update, store.version())
                store.commit(Commit(store.version() + 1, {"t": update}, store.version(), {}))
            elif kind == "scan and put":
                kept = list(store.scan("t", block_rows=7))
                store.clear("t")
                store.put("t", kept)
            elif kind == "clear":
                store.clear("t")
                model.rows.clear()
            np.testing.assert_array_equal(store.lookup({"t": ids})["t"], model.lookup(ids))
            assert store.row_count("t") == len(model.rows)
        expected = {one: (w.tobytes(), s.tobytes()) for one, (w, s) in model.rows.items()}
        assert rows_by_id(store, "t", block_rows=11) == expected


@pytest.mark.parametrize("size", [100_000, None])
def test_results_do_not_depend_on_threads(size: int | None) -> None:
    random = np.random.default_rng(0)
    spec = TableSpec("t", 8, size, optimizer=OptimizerSpec.of("adam"))
    small = TableSpec("small", 2, 1_000)
    with MemoryStore(threads=1) as one, MemoryStore(threads=5) as many:
        for store in (one, many):
            store.create_table(spec)
            store.create_table(small)
        for step in range(3):
            ids = random.permutation(100_000)[:60_000]
            updates = {
                "t": TableUpdate(ids, random.normal(size=(len(ids), 8)).astype(np.float32)),
                "small": TableUpdate(np.arange(700), random.normal(size=(700, 2)).astype(np.float32)),
            }
            rows = []
            for store in (one, many):
                store.commit(Commit(step + 1, updates, step, {}))
                rows.append(store.lookup({"t": np.arange(100_000), "small": np.arange(1_000)}))
            for name in ("t", "small"):
                assert rows[0][name].tobytes() == rows[1][name].tobytes()


def test_a_table_of_a_thousand_million_rows_costs_nothing_until_touched() -> None:
    spec = TableSpec("huge", 16, 10**9, optimizer=OptimizerSpec.of("adam"))
    with MemoryStore(threads=1) as store:
        store.create_table(spec)
        store.create_table(TableSpec("largest", 16, 2**63 - 1))
        ids = np.array([10**9 - 1, 0], np.int64)
        store.commit(Commit(1, {"huge": TableUpdate(ids, np.ones((2, 16), np.float32))}, 0, {}))
        assert store.row_count("huge") == 2
        assert sum(len(block.ids) for block in store.scan("huge")) == 2
        last = np.array([2**63 - 2])
        assert store.lookup({"largest": last})["largest"].shape == (1, 16)


def test_unknown_optimizer_is_refused_before_there_is_a_table() -> None:
    with MemoryStore(threads=1) as store:
        with pytest.raises(BadSpec, match="unknown optimizer 'newton'"):
            store.create_table(TableSpec("t", 4, optimizer=OptimizerSpec.of("newton")))
        assert store.specs() == {}


def test_a_closed_store_says_so() -> None:
    store = MemoryStore(threads=1)
    store.create_table(TableSpec("t", 4))
    store.close()
    with pytest.raises(StoreFailed, match="closed"):
        store.lookup({"t": np.arange(2)})
    with pytest.raises(StoreFailed, match="closed"):
        store.create_table(TableSpec("t", 4))


def test_many_blocks_put_one_by_one_grow_the_table() -> None:
    spec = TableSpec("t", 2, optimizer=OPTIMIZER)
    with MemoryStore(threads=1) as store:
        store.create_table(spec)
        for start in range(0, 20_000, 1_000):
            ids = np.arange(start, start + 1_000) * -7
            values = np.repeat(ids.astype(np.float32)[:, None], 2, axis=1)
            store.put("t", [RowBlock(ids, values, 1 - values)])
        ids = np.arange(20_000) * -7
        np.testing.assert_array_equal(store.lookup({"t": ids})["t"][:, 0], ids.astype(np.float32))
        assert store.row_count("t") == 20_000
