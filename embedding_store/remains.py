"""What is left of a store that cannot be opened any more, to be deleted so that a checkpoint can take its place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from elastable.embedding_store.contract.tier import Tier
from elastable.embedding_store.engine import StoreState
from elastable.embedding_store.errors import StoreBroken, StoreFailed
from elastable.embedding_store.log.files.file_log import FileLog
from elastable.embedding_store.open_reader import redis_url
from elastable.embedding_store.support.store_url import MemoryUrl, TierOptions, file_folder
from elastable.embedding_store.tiers.files.file_tier import FileTier
from elastable.embedding_store.tiers.redis.namespace_keys import delete_namespace, require_registry
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier

__all__ = ["OnBroken", "Remains", "remains_of"]


class Remains(ABC):
    """A store's rows and its log, which are not opened: they may be lost in part, or corrupt."""

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


OnBroken = Callable[[StoreBroken, Remains], None]
"""Is asked about a store that cannot be opened. It returns, and what is left is deleted; or it raises."""


@contextmanager
def remains_of(url: str, deadline_s: float | None = None) -> Iterator[Remains]:
    """What is left at a URL of one store in memory with a log, in files or in Redis; nothing is read yet.

    Args:
        url, deadline_s: As of `open_store`.

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
    place = RedisPlace(redis_url(rest, deadline_s))
    try:
        yield _InRedis(place, log)
    finally:
        place.close()


class _Folders(Remains):
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


class _InRedis(Remains):
    def __init__(self, place: RedisPlace, log: Path | None) -> None:
        self._place, self._log = place, log

    def require_known(self) -> None:
        require_registry(self._place)

    def other_writer(self) -> str | None:
        return self._place.other_writer()

    def record(self) -> bytes | None:
        return _record(RedisTier(self._place))

    def delete(self) -> None:
        delete_namespace(self._place)
        if self._log is not None:
            FileLog.delete_all(self._log)


def _record(tier: Tier) -> bytes | None:
    with suppress(StoreFailed):
        state = tier.state()
        return None if state is None else StoreState.from_bytes(state, tier.place).record
    return None
