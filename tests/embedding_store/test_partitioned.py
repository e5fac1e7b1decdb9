"""Partitioned stores keep the store contract, whatever their shards are, and equal a store that is not split."""

from __future__ import annotations

import pytest

from embedding_store.memory import MemoryStore
from embedding_store.partitioned import PartitionedStore
from embedding_store.store import EmbeddingStore
from tests.contracts.store_contract import StoreContract
from tests.contracts.store_samples import MakeStore


def memories(count: int) -> list[EmbeddingStore]:
    return [MemoryStore(threads=1) for _ in range(count)]


class TestTokenOverThree(StoreContract):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        return lambda: PartitionedStore(memories(3))


class TestEncodingOverFour(StoreContract):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        return lambda: PartitionedStore(memories(4), "encoding")


class TestTokenOverEncoding(StoreContract):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        return lambda: PartitionedStore([PartitionedStore(memories(2), "encoding") for _ in range(2)], "token")
