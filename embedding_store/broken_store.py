"""A store that cannot be opened any more, to be deleted so that a checkpoint can take its place."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import hiredis

from elastable.embedding_store.contract.tier import Tier
from elastable.embedding_store.engine.tiered.store_state import StoreState
from elastable.embedding_store.errors import StoreBroken, StoreFailed
from elastable.embedding_store.log.file_log import FileLog
from elastable.embedding_store.support.store_url import MemoryUrl, TierOptions, file_folder
from elastable.embedding_store.tiers.files.file_tier import FileTier
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from elastable.embedding_store.tiers.redis.reply_shapes import Command, reply_error
from elastable.embedding_store.tiers.redis.schema import (
    STAMP,
    all_rows_pattern,
    log_key,
    tier_state_key,
    tier_tables_key,
)
from elastable.embedding_store.tiers.redis.url import RedisUrl

_SCANNED = 1000  # keys that a server looks at for one reply
_NEVER_WRITTEN = bytes(8)


class BrokenStore(ABC):
    """Rows and log of a store that cannot be opened: they may be lost in part, or corrupt."""

    def require_known(self) -> None:  # noqa: B027 - a folder has one manifest, and is refused without it
        """Raises `StoreBroken` where rows are there of tables that the store does not know, as it would open empty."""

    def other_writer(self) -> str | None:
        """As `Tier.other_writer`; None also where a lock keeps other processes out."""
        return None

    def record(self) -> bytes | None:
        """`Commit.record` of the last version that was written besides the log; None: it cannot be read."""
        return None

    @abstractmethod
    def delete(self) -> None:
        """Deletes everything, once this process is the only one that can write.

        Where it breaks off, what is left is refused as before, or is the store as it was.

        Raises:
            TakenOver: another process has taken over meanwhile.
            StoreFailed, Unavailable, DeadlineExceeded: it may have been deleted in part.
        """


OnBroken = Callable[[StoreBroken, BrokenStore], None]
"""Is asked about a store that cannot be opened. It returns, and what is left is deleted; or it raises."""


@contextmanager
def broken_store(url: str, deadline_s: float | None = None) -> Iterator[BrokenStore]:
    """What is left at a URL of one store in memory with a log, in files or in Redis; nothing is read yet.

    Raises:
        StoreFailed, Unavailable, DeadlineExceeded: the server cannot be reached.
    """
    if url.startswith("memory"):
        folder = MemoryUrl.parse(url).log
        yield _Folders(None, folder)
        return
    options, rest = TierOptions.taken_from(url)
    log = options.log if isinstance(options.log, Path) else None
    if url.startswith("file:"):
        folder = file_folder(rest)
        yield _Folders(folder / "rows", folder / "log" if options.log == "own" else log)
        return
    place = RedisPlace(RedisUrl.parse(rest, deadline_s))
    try:
        yield _InRedis(place, log)
    finally:
        place.close()


class _Folders(BrokenStore):
    def __init__(self, rows: Path | None, log: Path | None) -> None:
        self._rows, self._log = rows, log

    def record(self) -> bytes | None:
        if self._rows is None:
            return None
        with suppress(StoreFailed), FileTier(self._rows, fsync=False) as tier:
            return _record(tier)
        return None

    def delete(self) -> None:
        if self._rows is not None:
            FileTier.delete_all(self._rows)
        if self._log is not None:
            FileLog.delete_all(self._log)


class _InRedis(BrokenStore):
    def __init__(self, place: RedisPlace, log: Path | None) -> None:
        self._place, self._log = place, log

    def require_known(self) -> None:
        """Raises `StoreBroken` where there are records of tables, and neither registry nor state know of any table.

        A Cluster loses no more than that with one of its nodes, and looks like an empty store then.
        """
        place = self._place
        if self._has_registry():
            return
        for keys in self._partitions():
            asked: list[tuple[bytes, Command]] = []
            for key in keys:
                asked += [(key, ("HLEN", key)), (key, ("HGET", key, STAMP))]
            replies = place.topology.call(asked, place.deadline())
            for key, length, stamp in zip(keys, replies[::2], replies[1::2], strict=True):
                # A table that another process is making has its partitions first; nothing was written to them.
                if (length > 1 or stamp != _NEVER_WRITTEN) and not self._has_registry():
                    raise StoreBroken(
                        f"redis at {place.url} holds records (key {key.decode(errors='replace')}) of a store whose "
                        f"registry of tables it has lost (namespace {place.url.namespace!r}). Go back to a checkpoint"
                    )

    def other_writer(self) -> str | None:
        return self._place.other_writer()

    def record(self) -> bytes | None:
        return _record(RedisTier(self._place))

    def delete(self) -> None:
        """Takes the store over. What is left where it breaks off is refused as before: the registry goes last."""
        place, namespace = self._place, self._place.url.namespace
        place.take_over()
        for keys in self._partitions():
            deadline = place.deadline()
            place.writing(deadline).call([(key, ("UNLINK", key)) for key in keys], deadline)
        gone: Command = ("DEL", tier_tables_key(namespace), tier_state_key(namespace), log_key(namespace))
        place.change([], lambda _: [gone], place.deadline())
        if self._log is not None:
            FileLog.delete_all(self._log)

    def _has_registry(self) -> bool:
        keys = tier_tables_key(self._place.url.namespace), tier_state_key(self._place.url.namespace)
        return any(self._place.topology.call([(key, ("EXISTS", key)) for key in keys], self._place.deadline()))

    def _partitions(self) -> Iterator[list[bytes]]:
        """Keys of the records of partitions, found by their names, some at a time; maybe one of them twice."""
        place, topology = self._place, self._place.topology
        for node in topology.nodes():
            cursor = b"0"
            while True:
                words: Command = ("SCAN", cursor, "MATCH", all_rows_pattern(place.url.namespace), "COUNT", _SCANNED)
                (reply,) = topology.call_at(node, [words], place.deadline())
                if isinstance(reply, hiredis.ReplyError):
                    raise reply_error(f"redis at {node} does not list its keys", str(reply), place.url)
                cursor, keys = reply
                if keys:
                    yield keys
                if cursor == b"0":
                    break


def _record(tier: Tier) -> bytes | None:
    with suppress(StoreFailed):
        state = tier.state()
        return None if state is None else StoreState.from_bytes(state, tier.place).record
    return None
