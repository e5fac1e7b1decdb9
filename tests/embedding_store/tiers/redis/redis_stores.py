"""Stores in Redis as tests need them: opened by URL, with the engine's own methods and a store's."""

from __future__ import annotations

from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.open_store import open_store

__all__ = ["redis_store"]


def redis_store(url: str) -> MemoryStore:
    """What `open_store` opens: it can be flushed."""
    store = open_store(url)
    assert isinstance(store, MemoryStore)
    return store
