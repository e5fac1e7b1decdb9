"""Read-only views of stores by URL."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from urllib.parse import parse_qsl

from elastable.embedding_store.composite import PartitionedSource
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.errors import BadInput, Unsupported
from elastable.embedding_store.log.contract import NoLog
from elastable.embedding_store.store_reader import StoreReader
from elastable.embedding_store.support.store_url import TierOptions, shard_urls
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from elastable.embedding_store.tiers.redis.streams.redis_log import RedisLog
from elastable.embedding_store.tiers.redis.url import SCHEMES, RedisUrl
from elastable.embedding_store.wire.remote_store import RemoteSource
from elastable.embedding_store.wire.shared.shared_source import SharedSource

__all__ = ["open_reader", "redis_url"]

_GRPC_DEADLINE_S = 30.0


def open_reader(url: str, follow: bool = False, deadline_s: float | None = None) -> RowSource:
    """A read-only view of a store that another process writes, such as a running job's. It disturbs nobody.

    Args:
        url: `redis://...` or `rediss://...`: rows are read where they are stored, also while no job is running; the
            reader is a `StoreReader`, whose `status` says how far it is behind. `grpc://host:port` of a master or a
            parameter server: rows are looked up there, and are always the newest. `token:URL,URL,...` or
            `encoding:URL,URL,...`: tables that are split over several of them.
        follow: Of rows in Redis: whether to read exactly the newest version. Rows that have changed since the last
            flush are then kept in memory, from the store's log.
        deadline_s: Seconds that one operation may take, where the URL does not say (`deadline=`); None: 10 for Redis,
            30 for gRPC.

    Raises:
        BadInput: no such URL can be read.
        Unsupported: several stores cannot be followed at one version.
        StoreBroken: rows or changes are lost.
        Unavailable, DeadlineExceeded, StoreFailed: the store cannot be reached.
    """
    strategy, shards = shard_urls(url)
    if strategy:
        if follow and any(_scheme(shard) in SCHEMES for shard in shards):
            raise Unsupported(
                f"follow=True of a store that is split ({strategy}:...): its shards are read at versions of their own; "
                "look rows up at the job's master (grpc://host:port), or read flushed rows with follow=False"
            )
        with ExitStack() as opened:
            readers = [opened.enter_context(open_reader(shard, follow, deadline_s)) for shard in shards]
            source = PartitionedSource(readers)
            opened.pop_all()
        return source
    if _scheme(url) == "grpc":
        address = url.removeprefix("grpc://")
        return SharedSource(RemoteSource(address, _GRPC_DEADLINE_S if deadline_s is None else deadline_s))
    if _scheme(url) in SCHEMES:
        return _redis_reader(url, follow, deadline_s)
    if _scheme(url) == "file" or url.partition("?")[0] == "memory":
        raise BadInput(
            f"rows of {url.partition('?')[0]} are in the process that has it open: look them up at its job's master "
            "(grpc://host:port), or open the store with et.open_store when no process has it"
        )
    shown = f"{_scheme(url)}://..." if "@" in url else url
    known = ("grpc://host:port", *(f"{scheme}://host:port" for scheme in SCHEMES))
    raise BadInput(f"a reader of {shown!r} is unknown: write {', '.join(known[:-1])} or {known[-1]}")


def redis_url(url: str, deadline_s: float | None) -> RedisUrl:
    """The URL with this deadline, unless it has one."""
    parsed = RedisUrl.parse(url)
    stated = "deadline" in dict(parse_qsl(url.partition("?")[2], keep_blank_values=True))
    return parsed if deadline_s is None or stated else replace(parsed, deadline=deadline_s)


def _redis_reader(url: str, follow: bool, deadline_s: float | None) -> StoreReader:
    options, rest = TierOptions.taken_from(url)
    if options.log != "own" and follow:
        raise Unsupported("follow=True of a store whose log is not in Redis (log=): its newest version is not there")
    parsed = redis_url(rest, deadline_s)
    with ExitStack() as opened:
        tier = opened.enter_context(RedisTier(parsed))
        log = opened.enter_context(RedisLog(parsed) if options.log == "own" else NoLog())
        reader = StoreReader(tier, log, follow, parsed.deadline)
        opened.pop_all()  # which are the reader's to close now
    return reader


def _scheme(url: str) -> str:
    return url.partition("://")[0]
