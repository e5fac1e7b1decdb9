"""Stores and sources by URL."""

from __future__ import annotations

import numpy as np
import pytest

from embedding_store.errors import BadInput
from embedding_store.memory import MemoryStore
from embedding_store.open_store import open_source, open_store
from embedding_store.redis_store import RedisStore
from embedding_store.spec import TableSpec
from embedding_store.store import Commit, EmbeddingStore, TableUpdate


def test_memory() -> None:
    with open_store("memory", threads=1) as store:
        assert isinstance(store, MemoryStore)


def test_a_source_reads_what_a_store_wrote(redis_url: str) -> None:
    ids = np.array([3, 9, 3], np.int64)
    with open_store(redis_url) as store, open_source(redis_url) as source:
        assert isinstance(store, RedisStore)
        assert not isinstance(source, EmbeddingStore)
        assert (source.specs(), source.version()) == ({}, 0)
        store.create_table(TableSpec("t", 4))
        store.commit(Commit(1, {"t": TableUpdate(ids[:1], np.ones((1, 4), np.float32))}, 0, {}))
        np.testing.assert_array_equal(source.lookup({"t": ids}, version=1)["t"], store.lookup({"t": ids})["t"])
        assert (source.specs(), source.version()) == (store.specs(), 1)


@pytest.mark.parametrize("url", ["", "disk", "http://me:secret@h:1", "rediss//h", "memory://"])
def test_unknown_schemes(url: str) -> None:
    with pytest.raises(BadInput, match=r"memory, grpc://host:port, .*redis://host:port or rediss://host:port") as refused:
        open_store(url)
    assert "secret" not in str(refused.value)
    with pytest.raises(BadInput, match="redis://host:port or rediss://host:port"):
        open_source(url)


def test_memory_is_no_source_of_its_own() -> None:
    with pytest.raises(BadInput, match="'memory' is unknown"):
        open_source("memory")
