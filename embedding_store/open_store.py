"""Stores by URL, and read-only views of them."""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from elastable.embedding_store.broken_store import OnBroken, broken_store
from elastable.embedding_store.composite.partitioned_store import PartitionedSource, PartitionedStore
from elastable.embedding_store.composite.store_servers import StoreServers
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.contract.tier import Tier
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.engine.store_history import DEFAULT_LOG_BYTES, StoreHistory
from elastable.embedding_store.engine.store_tier import DEFAULT_EVERY_S, StoreTier
from elastable.embedding_store.errors import BadInput, StoreBroken, Unsupported
from elastable.embedding_store.log.acknowledged import AcknowledgedFile, acknowledged_beside
from elastable.embedding_store.log.contract import Log, NoLog
from elastable.embedding_store.log.file_log import FileLog
from elastable.embedding_store.store_reader import HeldLog, HeldReader, HeldServers, StoreReader
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.support.memory_budget import row_budget_here
from elastable.embedding_store.support.store_url import (
    SERVERS,
    MemoryUrl,
    TierOptions,
    file_folder,
    server_addresses,
    servers_strategy,
    shard_urls,
)
from elastable.embedding_store.tables.table import BaseStore
from elastable.embedding_store.tiers.files.file_tier import FileTier
from elastable.embedding_store.tiers.redis.redis_log import RedisLog
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from elastable.embedding_store.tiers.redis.url import DEFAULT_DEADLINE_S, SCHEMES, RedisUrl
from elastable.embedding_store.wire.access.credentials import Credentials
from elastable.embedding_store.wire.pushes.remote_store import RemoteStore, ShardClient
from elastable.embedding_store.wire.remote_source import RemoteSource
from elastable.embedding_store.wire.shared.shared_source import SharedSource
from elastable.embedding_store.wire.shared.shared_store import SharedMemoryStore

_LOG = logging.getLogger(__name__)

Part = TypeVar("Part", bound=RowSource)
Whole = TypeVar("Whole", bound=RowSource)

GRPC_DEADLINE_S = 30.0
"""Seconds for each call to a server, where nobody says otherwise."""


def operation_deadline(job_deadline_s: float) -> float | None:
    """What `open_store` takes as its `deadline_s` where a job gives up after so many seconds.

    A job repeats operations that fail, so each of them keeps its own, shorter
    deadline (None), unless the job's is shorter still.
    """
    return job_deadline_s if job_deadline_s < DEFAULT_DEADLINE_S else None


def check_store_url(url: str) -> None:
    """Reads a URL as `open_store` does, and opens nothing.

    Raises:
        BadInput: no such URL can be.
    """
    if url.startswith(SERVERS):
        server_addresses(url)
        return
    for one in shard_urls(url)[1] or [url]:
        if _is_memory(one):
            MemoryUrl.parse(one)
        elif _scheme(one) == "file":
            _file_url(one)
        elif _scheme(one) == "grpc":
            Address.parse(one.removeprefix("grpc://"))
        elif _scheme(one) in SCHEMES:
            RedisUrl.parse(_redis_options(one)[1])
        else:
            known = "memory", "memory?log=/folder", "file:///folder", "grpc://host:port", "servers:host:port,host:port"
            raise _unknown("store", one, (*known, *(f"{scheme}://host:port" for scheme in SCHEMES)))


def open_store(
    url: str,
    threads: int | None = None,
    shared: bool = False,
    deadline_s: float | None = None,
    on_broken: OnBroken | None = None,
    credentials: Credentials | None = None,
    acknowledged_in: Path | None = None,
    accept_version: int | None = None,
) -> BaseStore:
    """The store at a URL, to read and to write.

    Args:
        url: "memory", with `?log=/folder` as `MemoryUrl` describes; `file:///folder` as `FileUrl` describes;
            `redis://...` or `rediss://...` as `RedisUrl` does; `grpc://host:port` of a parameter server
            (`elastable serve`); `token:URL,URL,...` or `encoding:URL,URL,...` for tables that are split over several
            of them; `servers:host:port,host:port,...` for store servers (`elastable store`), over which tables are
            split by id, or by column with `servers:encoding:...`.
        threads: Of a memory or file store; None: one a core.
        shared: Whether other processes of this host may read the rows of a memory
            store from its memory; where the system has no such memory, nobody does.
        deadline_s: Seconds that one operation of a store elsewhere may take, connecting and repeats included, where
            its URL does not say (`deadline=`); None: 10 for Redis, 30 for gRPC.
        on_broken: Is asked where rows or changes are lost or corrupt, for each shard by itself: what is left of the
            store is deleted, and an empty one takes its place; or it raises. None: the error is raised.
        credentials: Of the client of store servers; None, and of other stores: those of the environment.
        acknowledged_in: A folder where the newest version is noted of each store in Redis, so that it is refused once
            it has lost that, where its URL does not say (`acknowledged_in=`); None: nowhere. Of a store in files it is
            noted next to its folder.
        accept_version: A store that is at this version is opened although a later one was acknowledged, where its URL
            does not say (`accept_version=`); None: none is.

    Raises:
        BadInput: no such URL can be.
        StoreBroken: rows or changes are lost, or corrupt; or the store is behind the version that was acknowledged.
        Unavailable, DeadlineExceeded, StoreFailed: as the store itself.
    """
    check_store_url(url)
    if url.startswith(SERVERS):
        deadline = _or(deadline_s, GRPC_DEADLINE_S)
        clients = (ShardClient(each, deadline, credentials) for each in server_addresses(url))
        return _of_all(clients, lambda servers: StoreServers(servers, strategy=servers_strategy(url)))
    strategy, shards = shard_urls(url)
    opening = _Opening(threads, shared and not strategy, deadline_s, acknowledged_in, accept_version)
    if strategy:
        stores = (opening.store(shard, on_broken) for shard in shards)
        return _of_all(stores, lambda stores: PartitionedStore(stores, strategy))
    return opening.store(url, on_broken)


@dataclass(frozen=True, slots=True)
class _Opening:
    """How stores are opened, one by one; the fields are those of `open_store`."""

    threads: int | None
    shared: bool
    deadline_s: float | None
    acknowledged_in: Path | None
    accept_version: int | None

    def store(self, url: str, on_broken: OnBroken | None) -> BaseStore:
        """The store at a URL; an empty one, where it is broken and `on_broken` returns."""
        if on_broken is None or url == "memory" or _scheme(url) == "grpc":
            return self._one(url)
        try:
            with broken_store(url, self.deadline_s) as broken:
                broken.require_known()
            return self._one(url)
        except StoreBroken as error:
            with broken_store(url, self.deadline_s) as broken:
                on_broken(error, broken)
                broken.delete()
            self._acknowledged(url).forget()
        return self._one(url)

    def _one(self, url: str) -> BaseStore:
        if _is_memory(url):
            return self._memory_store(MemoryUrl.parse(url))
        if _scheme(url) == "file":
            return self._file_store(url)
        if _scheme(url) == "grpc":
            return RemoteStore(url.removeprefix("grpc://"), _or(self.deadline_s, GRPC_DEADLINE_S))
        return self._redis_store(url)

    def _memory_store(self, url: MemoryUrl) -> MemoryStore:
        if url.log is None:
            return self._empty_memory_store()
        log_bytes = DEFAULT_LOG_BYTES if url.log_bytes is None else url.log_bytes
        accepted = self.accept_version if url.accept_version is None else url.accept_version
        with ExitStack() as opened:
            history = opened.enter_context(
                StoreHistory(url.log, fsync=url.fsync, log_bytes=log_bytes, accept_version=accepted)
            )
            store = opened.enter_context(self._empty_memory_store())
            store.keep_history(history)
            opened.pop_all()  # the store closes its history
        return store

    def _file_store(self, url: str) -> MemoryStore:
        options, folder = _file_url(url)
        with ExitStack() as opened:
            tier = opened.enter_context(FileTier(folder / "rows", fsync=options.fsync != "never"))
            log = opened.enter_context(_log(options) or FileLog(folder / "log", fsync=options.fsync))
            return self._tiered_store(opened, tier, log, options, self._acknowledged(url))

    def _redis_store(self, url: str) -> MemoryStore:
        options, rest = _redis_options(url)
        with ExitStack() as opened:
            place = RedisPlace(RedisUrl.parse(rest, self.deadline_s))
            opened.callback(place.close)
            place.require_fit_to_write()
            tier = opened.enter_context(RedisTier(place))
            log = opened.enter_context(_log(options) or RedisLog(place))
            return self._tiered_store(opened, tier, log, options, self._acknowledged(url))

    def _tiered_store(
        self, opened: ExitStack, tier: Tier, log: Log, options: TierOptions, acknowledged: AcknowledgedFile
    ) -> MemoryStore:
        """A store with a tier, which closes whatever was opened."""
        budget = row_budget_here() if options.budget is None else options.budget
        store = self._empty_memory_store(options.before_image_bytes)
        behind = StoreTier(tier, log, budget, store.new_slab, opened.pop_all().close, acknowledged)
        try:
            store.keep_tier(
                behind,
                log_bytes=DEFAULT_LOG_BYTES if options.log_bytes is None else options.log_bytes,
                every_s=DEFAULT_EVERY_S if options.flush_s is None else options.flush_s,
            )
        except BaseException:
            behind.close()
            store.close()
            raise
        return store

    def _empty_memory_store(self, before_image_bytes: int | None = None) -> MemoryStore:
        if self.shared:
            try:
                return SharedMemoryStore(self.threads, before_image_bytes=before_image_bytes)
            except (OSError, AttributeError) as error:  # no memfd, no abstract sockets: not Linux
                _LOG.info("rows are in memory of this process alone: %s", error)
        return MemoryStore(self.threads, before_image_bytes=before_image_bytes)

    def _acknowledged(self, url: str) -> AcknowledgedFile:
        """Where it is noted what the store at a URL has acknowledged."""
        if _is_memory(url):
            folder = MemoryUrl.parse(url).log
            return AcknowledgedFile(None if folder is None else acknowledged_beside(folder))
        options, rest = TierOptions.taken_from(url)
        accepted = self.accept_version if options.accept_version is None else options.accept_version
        if _scheme(url) == "file":
            return AcknowledgedFile(acknowledged_beside(file_folder(rest)), accepted)
        folder, redis = options.acknowledged_in or self.acknowledged_in, RedisUrl.parse(rest)
        if folder is None:
            _LOG.info("%s: what it acknowledges is noted nowhere else: write acknowledged_in=/folder in its URL", redis)
            return AcknowledgedFile(None, accepted)
        digest = sha256(f"{redis} {redis.namespace}".encode()).hexdigest()[:16]
        return AcknowledgedFile(folder / f"store-{digest}.acknowledged", accepted)


def _of_all(opening: Iterable[Part], make: Callable[[list[Part]], Whole]) -> Whole:
    """What is made of several stores, which it closes; all are closed where one of them cannot be opened."""
    with ExitStack() as opened:
        whole = make([opened.push(part) for part in opening])
        opened.pop_all()
    return whole


def _or(deadline_s: float | None, default_s: float) -> float:
    return default_s if deadline_s is None else deadline_s


def _file_url(url: str) -> tuple[TierOptions, Path]:
    options, rest = TierOptions.taken_from(url)
    return options, file_folder(rest)


def _redis_options(url: str) -> tuple[TierOptions, str]:
    """The options of the engine, and the rest of the URL."""
    options, rest = TierOptions.taken_from(url)
    if options.fsync != "interval" and not isinstance(options.log, Path):
        raise BadInput(
            f"fsync={options.fsync}: the server decides how durable a log in Redis is (appendfsync); leave fsync= out "
            "or write log=/folder too"
        )
    return options, rest


def _log(options: TierOptions) -> Log | None:
    """The log, where it is not the tier's own."""
    if isinstance(options.log, Path):
        return FileLog(options.log, fsync=options.fsync)
    return NoLog() if options.log == "none" else None


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
        return _of_all((open_reader(shard, follow, deadline_s) for shard in shards), PartitionedSource)
    if _scheme(url) == "grpc":
        address = url.removeprefix("grpc://")
        return SharedSource(RemoteSource(address, _or(deadline_s, GRPC_DEADLINE_S)))
    if _scheme(url) in SCHEMES:
        return _redis_reader(url, follow, deadline_s)
    if _scheme(url) == "file" or _is_memory(url):
        raise BadInput(
            f"rows of {url.partition('?')[0]} are in the process that has it open: look them up at its job's master "
            "(grpc://host:port), or open the store with et.open_store when no process has it"
        )
    raise _unknown("a reader of", url, ("grpc://host:port", *(f"{scheme}://host:port" for scheme in SCHEMES)))


def open_follower(url: str, deadline_s: float | None = None) -> HeldReader | HeldLog | HeldServers:
    """A reader that holds all rows of a store in memory, and goes from version to version when it is told to.

    Args:
        url: `redis://...`, `rediss://...` or `memory?log=/folder` of a store that another process writes;
            `grpc://host:port` of a job's master, or `servers:host:port,...` of its store servers, whose stores have
            logs.
        deadline_s: As of `open_reader`.

    Raises:
        BadInput, Unsupported: a store that cannot be followed.
        StoreBroken, Unavailable, DeadlineExceeded, StoreFailed: as of `open_reader`.
    """
    if _is_memory(url) and (folder := MemoryUrl.parse(url).log) is not None:
        return HeldLog(folder)
    if url.startswith(SERVERS) or _scheme(url) == "grpc":
        addresses = server_addresses(url) if url.startswith(SERVERS) else [url.removeprefix("grpc://")]
        return HeldServers(addresses, _or(deadline_s, GRPC_DEADLINE_S))
    if _scheme(url) not in SCHEMES:
        known = ["memory?log=/folder", "grpc://host:port", f"{SERVERS}host:port,..."]
        known += [f"{scheme}://host:port" for scheme in SCHEMES]
        raise _unknown("a follower of", url, known)
    reader = _redis_reader(url, True, deadline_s, held=True)
    assert isinstance(reader, HeldReader)
    return reader


def _redis_reader(url: str, follow: bool, deadline_s: float | None, held: bool = False) -> StoreReader:
    options, rest = TierOptions.taken_from(url)
    if options.log != "own" and follow:
        raise Unsupported("follow=True of a store whose log is not in Redis (log=): its newest version is not there")
    parsed = RedisUrl.parse(rest, deadline_s)
    with ExitStack() as opened:
        tier = opened.enter_context(RedisTier(parsed))
        log = opened.enter_context(RedisLog(parsed) if options.log == "own" else NoLog())
        timeout_s = parsed.deadline
        reader = HeldReader(tier, log, timeout_s) if held else StoreReader(tier, log, follow, timeout_s)
        opened.pop_all()  # which are the reader's to close now
    return reader


def _scheme(url: str) -> str:
    return url.partition("://")[0]


def _is_memory(url: str) -> bool:
    return url == "memory" or url.startswith("memory?")


def _unknown(what: str, url: str, known: Sequence[str]) -> BadInput:
    # A URL may hold a password: what precedes the @ is not repeated.
    shown = f"{_scheme(url)}://..." if "@" in url else url
    return BadInput(f"{what} {shown!r} is unknown: write {', '.join(known[:-1])} or {known[-1]}")
