"""What the log of a store in Redis holds, and how it is taken back to a version while no store is open."""

from __future__ import annotations

from contextlib import closing
from itertools import count

from elastable.embedding_store.engine import StoreState
from elastable.embedding_store.errors import BadInput, StaleVersion, StoreBroken, StoreFailed
from elastable.embedding_store.log.inspection import ChangeTally, LogReport, entry_of_version
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from elastable.embedding_store.tiers.redis.streams.redis_log import RedisLog

__all__ = ["inspect_redis_log", "truncate_redis_log"]

_ATTEMPTS = 5


def inspect_redis_log(url: str) -> LogReport:
    """Reads and checks every entry of a log; nothing is taken over or changed.

    The store may go on meanwhile; what it appends during the call may be missing here.

    Raises:
        BadInput: no such URL can be, or no store has a log there.
        StoreBroken: an entry is corrupt or missing, or the log and the rows of the store do not fit.
        StoreFailed, Unavailable, DeadlineExceeded: the server cannot be asked.
    """
    with closing(RedisPlace(url)) as place, RedisTier(place) as tier, RedisLog(place) as log:
        for attempt in count(1):
            try:
                return _report(tier, log)
            except BadInput:
                if attempt == _ATTEMPTS or not log.last:
                    raise  # else it was trimmed while it was read
    raise AssertionError("unreachable")


def _report(tier: RedisTier, log: RedisLog) -> LogReport:
    written = max(_flushed(tier)[0], tier.sequence)
    log.refresh()
    first, last, size = log.first, log.last, log.bytes
    flushed, version = _flushed(tier)  # the log is never trimmed beyond that
    if not last and not flushed:
        raise BadInput(f"{tier.place} holds no log")
    if first > flushed + 1 or last < written:
        raise StoreBroken(
            f"{tier.place} is incomplete: its rows include log entries up to {written}, its state those up to "
            f"{flushed}, and its log holds {first} to {last}"
        )
    tally = ChangeTally(version)
    for entry in log.entries(after=first - 1):
        tally.add(entry)
    return LogReport(None, version, 0, first, last, tally.version, size, 0, dict(tally.kinds), tally.rows, flushed)


def truncate_redis_log(url: str, version: int) -> int:
    """Takes every change after a version back from the log; how many rows these changes had written.

    Raises:
        StoreFailed: a store has the log open.
        StaleVersion: rows of later versions are in the store already.
        StoreBroken: the log is corrupt before that version.
    """
    with closing(RedisPlace(url)) as place, RedisTier(place) as tier, RedisLog(place) as log:
        writer = place.other_writer()
        if writer is not None:
            raise StoreFailed(f"{tier.place} is open in process {writer}: end it first")
        place.take_over()
        log.refresh()
        flushed, flushed_version = _flushed(tier)
        keep, rows = entry_of_version(log, flushed, version)
        if flushed_version > version or tier.sequence > keep:
            raise StaleVersion(
                f"{tier.place} cannot go back to version {version}: rows of later versions are written; "
                "restore a checkpoint"
            )
        log.truncate(keep)
        return rows


def _flushed(tier: RedisTier) -> tuple[int, int]:
    """Up to which entry, and to which version, every row is in the tier."""
    content = tier.state()
    if content is None:
        return 0, 0
    state = StoreState.from_bytes(content, tier.place)
    return state.sequence, state.version
