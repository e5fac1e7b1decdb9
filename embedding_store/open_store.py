"""Stores and row sources by URL."""

from __future__ import annotations

from embedding_store.errors import BadInput
from embedding_store.memory import MemoryStore
from embedding_store.redis_reader import RedisReader
from embedding_store.redis_store import RedisStore
from embedding_store.redis_url import SCHEMES
from embedding_store.remote import RemoteSource
from embedding_store.remote_store import RemoteStore
from embedding_store.store import EmbeddingStore, RowSource

__all__ = ["open_source", "open_store"]


def open_store(url: str, threads: int | None = None) -> EmbeddingStore:
    """The store at a URL, to read and to write.

    Args:
        url: "memory", `grpc://host:port` of a bare parameter server (`elastable master`
            without a model), or `redis://...` or `rediss://...` as `RedisUrl` describes.
        threads: Of a memory store; None: one a core.

    Raises:
        BadInput: no such URL can be.
        Unavailable, DeadlineExceeded, StoreFailed: as the store itself.
    """
    if url == "memory":
        return MemoryStore(threads)
    if _scheme(url) == "grpc":
        return RemoteStore(url.removeprefix("grpc://"))
    if _scheme(url) in SCHEMES:
        return RedisStore(url)
    raise _unknown(url, ("memory", "grpc://host:port", *(f"{scheme}://host:port" for scheme in SCHEMES)))


def open_source(url: str) -> RowSource:
    """The rows at a URL, to read from any process.

    Args:
        url: `grpc://host:port` of a master, or `redis://...` or `rediss://...`.

    Raises:
        BadInput: no such URL can be.
        Unavailable, DeadlineExceeded, StoreFailed: as the source itself.
    """
    if _scheme(url) == "grpc":
        return RemoteSource(url.removeprefix("grpc://"))
    if _scheme(url) in SCHEMES:
        return RedisReader(url)
    raise _unknown(url, ("grpc://host:port", *(f"{scheme}://host:port" for scheme in SCHEMES)))


def _scheme(url: str) -> str:
    return url.partition("://")[0]


def _unknown(url: str, known: tuple[str, ...]) -> BadInput:
    # A URL may hold a password: what stands before the @ is not repeated.
    shown = f"{_scheme(url)}://..." if "@" in url else url
    return BadInput(f"store {shown!r} is unknown: write {', '.join(known[:-1])} or {known[-1]}")
