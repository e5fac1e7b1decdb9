"""The memory store keeps the store contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from embedding_store.memory import MemoryStore
from tests.contracts.store_contract import MakeStore, StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        return lambda: MemoryStore(threads=2)


class TestMemoryStoreWithoutDirectRows(StoreContract):
    @pytest.fixture
    def make_store(self) -> Callable[[], MemoryStore]:
        return lambda: MemoryStore(threads=1, direct_bytes=0)
