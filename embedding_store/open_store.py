"""Stores and row sources by URL."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from urllib.parse import parse_qsl

from elastable.embedding_store.composite.partitions.partitioned_store import PartitionedSource, PartitionedStore
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.history.store_history import DEFAULT_LOG_BYTES, StoreHistory
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.support.store_url import FileUrl, MemoryUrl, shard_urls
from elastable.embedding_store.tiers.files.file_store import DEFAULT_BUDGET, FileStore
from elastable.embedding_store.tiers.redis.redis_reader import RedisReader
from elastable.embedding_store.tiers.redis.redis_store import RedisStore
from elastable.embedding_store.tiers.redis.url import DEFAULT_DEADLINE_S, SCHEMES, RedisUrl
from elastable.embedding_store.wire.client.remote_source import RemoteSource
from elastable.embedding_store.wire.client.remote_store import RemoteStore
from elastable.embedding_store.wire.shared.shared_source import SharedSource
from elastable.embedding_store.wire.shared.shared_store import SharedMemoryStore

__all__ = ["open_source", "open_store", "operation_deadline"]

_LOG = logging.getLogger(__name__)

_GRPC_DEADLINE_S = 30.0


def operation_deadline(job_deadline_s: float) -> float | None:
    """What `open_store` takes as its `deadline_s` where a job gives up after so many seconds.

    A job repeats operations that fail, so each of them keeps its own, shorter
    deadline (None), unless the job's is shorter still.
    """
    return job_deadline_s if job_deadline_s < DEFAULT_DEADLINE_S else None


def open_store(
    url: str, threads: int | None = None, shared: bool = False, deadline_s: float | None = None
) -> EmbeddingStore:
    """The store at a URL, to read and to write.

    Args:
        url: "memory", with `?log=/folder` as `MemoryUrl` describes; `grpc://host:port` of a parameter server
            (`elastable serve`),
            `file:///folder` as `FileUrl` describes, or `redis://...` or
            `rediss://...` as `RedisUrl` does;
            `token:URL,URL,...` or `encoding:URL,URL,...` for tables that are split over several of them.
        threads: Of a memory or file store; None: one a core.
        shared: Whether other processes of this host may read the rows of a memory
            store from its memory; where the system has no such memory, nobody does.
        deadline_s: Seconds that one operation of a store elsewhere may take, connecting and repeats included, where
            its URL does not say (`deadline=`); None: 10 for Redis, 30 for gRPC.

    Raises:
        BadInput: no such URL can be.
        Unavailable, DeadlineExceeded, StoreFailed: as the store itself.
    """
    strategy, shards = shard_urls(url)
    if strategy:
        with ExitStack() as opened:
            stores = [opened.enter_context(open_store(shard, threads, deadline_s=deadline_s)) for shard in shards]
            store = PartitionedStore(stores, strategy)
            opened.pop_all()  # which are the store's to close now
        return store
    if url == "memory" or url.startswith("memory?"):
        return _memory_store(MemoryUrl.parse(url), threads, shared)
    if _scheme(url) == "file":
        place = FileUrl.parse(url)
        budget = DEFAULT_BUDGET if place.budget is None else place.budget
        return FileStore(place.folder, budget, threads, unclean=place.unclean)
    if _scheme(url) == "grpc":
        return RemoteStore(url.removeprefix("grpc://"), _or(deadline_s, _GRPC_DEADLINE_S))
    if _scheme(url) in SCHEMES:
        return RedisStore(_redis_url(url, deadline_s))
    raise _unknown(
        url,
        (
            "memory",
            "memory?log=/folder",
            "file:///folder",
            "grpc://host:port",
            *(f"{scheme}://host:port" for scheme in SCHEMES),
        ),
    )


def open_source(url: str, deadline_s: float | None = None) -> RowSource:
    """The rows at a URL, to read from any process.

    Args:
        url: `grpc://host:port` of a master, or `redis://...` or `rediss://...`;
            `token:URL,URL,...` or `encoding:URL,URL,...` where tables are split over several of them.
        deadline_s: As of `open_store`.

    Raises:
        BadInput: no such URL can be.
        Unavailable, DeadlineExceeded, StoreFailed: as the source itself.
    """
    strategy, shards = shard_urls(url)
    if strategy:
        with ExitStack() as opened:
            source = PartitionedSource([opened.enter_context(open_source(shard, deadline_s)) for shard in shards])
            opened.pop_all()
        return source
    if _scheme(url) == "grpc":
        return SharedSource(RemoteSource(url.removeprefix("grpc://"), _or(deadline_s, _GRPC_DEADLINE_S)))
    if _scheme(url) in SCHEMES:
        return RedisReader(_redis_url(url, deadline_s))
    raise _unknown(url, ("grpc://host:port", *(f"{scheme}://host:port" for scheme in SCHEMES)))


def _redis_url(url: str, deadline_s: float | None) -> RedisUrl:
    """The URL with this deadline, unless it has one."""
    parsed = RedisUrl.parse(url)
    stated = "deadline" in dict(parse_qsl(url.partition("?")[2], keep_blank_values=True))
    return parsed if deadline_s is None or stated else replace(parsed, deadline=deadline_s)


def _or(deadline_s: float | None, default_s: float) -> float:
    return default_s if deadline_s is None else deadline_s


def _memory_store(url: MemoryUrl, threads: int | None, shared: bool) -> MemoryStore:
    if url.log is None:
        return _empty_memory_store(threads, shared)
    log_bytes = DEFAULT_LOG_BYTES if url.log_bytes is None else url.log_bytes
    with ExitStack() as opened:
        history = opened.enter_context(StoreHistory(url.log, fsync=url.fsync, log_bytes=log_bytes))
        store = opened.enter_context(_empty_memory_store(threads, shared))
        store.keep_history(history)
        opened.pop_all()  # the store closes its history
    return store


def _empty_memory_store(threads: int | None, shared: bool) -> MemoryStore:
    if shared:
        try:
            return SharedMemoryStore(threads)
        except (OSError, AttributeError) as error:  # no memfd, no abstract sockets: not Linux
            _LOG.info("rows are in memory of this process alone: %s", error)
    return MemoryStore(threads)


def _scheme(url: str) -> str:
    return url.partition("://")[0]


def _unknown(url: str, known: tuple[str, ...]) -> BadInput:
    # A URL may hold a password: what stands before the @ is not repeated.
    if _scheme(url).startswith("cached+"):
        raise BadInput("store cached+...: stores hold their hot rows in memory; leave out cached+ and rows= or bytes=")
    shown = f"{_scheme(url)}://..." if "@" in url else url
    return BadInput(f"store {shown!r} is unknown: write {', '.join(known[:-1])} or {known[-1]}")
