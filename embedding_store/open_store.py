"""Stores and row sources by URL."""

from __future__ import annotations

import logging
import re

from embedding_store.cached_source import CachedSource
from embedding_store.cached_store import CachedStore
from embedding_store.errors import BadInput
from embedding_store.file_store import DEFAULT_BUDGET, FileStore
from embedding_store.memory import MemoryStore
from embedding_store.partition import STRATEGIES
from embedding_store.partitioned import PartitionedStore
from embedding_store.partitioned_source import PartitionedSource
from embedding_store.redis_reader import RedisReader
from embedding_store.redis_store import RedisStore
from embedding_store.redis_url import SCHEMES
from embedding_store.remote import RemoteSource
from embedding_store.remote_store import RemoteStore
from embedding_store.shared_source import SharedSource
from embedding_store.shared_store import SharedMemoryStore
from embedding_store.store import EmbeddingStore, RowSource
from embedding_store.store_url import CachedUrl, FileUrl

__all__ = ["open_source", "open_store"]

_LOG = logging.getLogger(__name__)

# The comma between two URLs; those between the hosts of one stand before no scheme.
_NEXT_URL = re.compile(r",(?=memory(?:,|$)|[a-z]+(?:[:+][a-z]+)*://)")


def open_store(url: str, threads: int | None = None, shared: bool = False) -> EmbeddingStore:
    """The store at a URL, to read and to write.

    Args:
        url: "memory", `grpc://host:port` of a bare parameter server (`elastable master`
            without a model), `file:///folder` as `FileUrl` describes, or `redis://...` or
            `rediss://...` as `RedisUrl` does; `cached+URL?rows=...` for any of the last four
            with its hot rows in memory;
            `token:URL,URL,...` or `encoding:URL,URL,...` for tables that are split over several of them.
        threads: Of a memory or file store, or a cache; None: one a core.
        shared: Whether other processes of this host may read the rows of a memory
            store from its memory; where the system has no such memory, nobody does.

    Raises:
        BadInput: no such URL can be.
        Unavailable, DeadlineExceeded, StoreFailed: as the store itself.
    """
    strategy, shards = _shards(url)
    if strategy:
        return PartitionedStore([open_store(shard, threads) for shard in shards], strategy)
    if url == "memory":
        return _memory_store(threads, shared)
    if _scheme(url).startswith("cached+"):
        cached = CachedUrl.parse(url)
        behind = open_store(_not_twice(cached.behind), threads)
        return CachedStore(behind, rows=cached.rows, bytes=cached.bytes, threads=threads)
    if _scheme(url) == "file":
        place = FileUrl.parse(url)
        budget = DEFAULT_BUDGET if place.budget is None else place.budget
        return FileStore(place.folder, budget, threads, unclean=place.unclean)
    if _scheme(url) == "grpc":
        return RemoteStore(url.removeprefix("grpc://"))
    if _scheme(url) in SCHEMES:
        return RedisStore(url)
    raise _unknown(
        url, ("memory", "file:///folder", "grpc://host:port", *(f"{scheme}://host:port" for scheme in SCHEMES))
    )


def open_source(url: str) -> RowSource:
    """The rows at a URL, to read from any process.

    Args:
        url: `grpc://host:port` of a master, or `redis://...` or `rediss://...`;
            `cached+URL?rows=...` for one of these with its hot rows in memory;
            `token:URL,URL,...` or `encoding:URL,URL,...` where tables are split over several of them.

    Raises:
        BadInput: no such URL can be.
        Unavailable, DeadlineExceeded, StoreFailed: as the source itself.
    """
    strategy, shards = _shards(url)
    if strategy:
        return PartitionedSource([open_source(shard) for shard in shards])
    if _scheme(url).startswith("cached+"):
        cached = CachedUrl.parse(url)
        return CachedSource(open_source(_not_twice(cached.behind)), rows=cached.rows, bytes=cached.bytes)
    if _scheme(url) == "grpc":
        return SharedSource(RemoteSource(url.removeprefix("grpc://")))
    if _scheme(url) in SCHEMES:
        return RedisReader(url)
    raise _unknown(url, ("grpc://host:port", *(f"{scheme}://host:port" for scheme in SCHEMES)))


def _memory_store(threads: int | None, shared: bool) -> MemoryStore:
    if shared:
        try:
            return SharedMemoryStore(threads)
        except (OSError, AttributeError) as error:  # no memfd, no abstract sockets: not Linux
            _LOG.info("rows are in memory of this process alone: %s", error)
    return MemoryStore(threads)


def _shards(url: str) -> tuple[str, list[str]]:
    """Strategy and shards of a partitioned store's URL; "" for any other."""
    strategy, separator, rest = url.partition(":")
    if not separator or strategy not in STRATEGIES:
        return "", []
    shards = _NEXT_URL.split(rest)
    for shard in shards:
        if shard.partition(":")[0] in STRATEGIES:
            raise BadInput(f"store {strategy}:...: a shard cannot be partitioned by URL; join stores in Python instead")
    return strategy, shards


def _not_twice(url: str) -> str:
    if _scheme(url).startswith("cached+"):
        raise BadInput("store cached+cached+...: a cache in front of a cache holds the same rows; write cached+ once")
    return url


def _scheme(url: str) -> str:
    return url.partition("://")[0]


def _unknown(url: str, known: tuple[str, ...]) -> BadInput:
    # A URL may hold a password: what stands before the @ is not repeated.
    shown = f"{_scheme(url)}://..." if "@" in url else url
    return BadInput(f"store {shown!r} is unknown: write {', '.join(known[:-1])} or {known[-1]}")
