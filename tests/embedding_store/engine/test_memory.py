"""The memory store keeps the store contract, and is equal to a dictionary."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from elastable.embedding_store import Commit, MemoryStore, OptimizerSpec, TableSpec, TableUpdate
from elastable.embedding_store.engine.store_history import StoreHistory
from tests.contracts.store_contract import StoreContract
from tests.contracts.store_samples import MakeStore, create_tables


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


def test_a_table_of_a_thousand_million_rows_costs_nothing_until_touched() -> None:
    spec = TableSpec("huge", 16, 10**9, optimizer=OptimizerSpec.of("adam"))
    with create_tables(MemoryStore(threads=1), spec) as store:
        store.create_table(TableSpec("largest", 16, 2**63 - 1))
        ids = np.array([10**9 - 1, 0], np.int64)
        store.commit(Commit(1, {"huge": TableUpdate(ids, np.ones((2, 16), np.float32))}, 0, {}))
        assert store.row_count("huge") == 2
        assert sum(len(block.ids) for block in store.scan("huge")) == 2
        last = np.array([2**63 - 2])
        assert store.lookup({"largest": last})["largest"].shape == (1, 16)
