"""Rewrites a store of an earlier release, wherever it is: in Redis, in files, or split over several places."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import unquote

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.support.store_url import shard_urls
from elastable.embedding_store.tiers.files.file_tier import FileTier
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from elastable.embedding_store.tiers.redis.url import SCHEMES, RedisUrl
from elastable.embedding_store.upgrade.file_upgrade import upgrade_folder
from elastable.embedding_store.upgrade.redis_upgrade import current_version, upgrade_redis

__all__ = ["upgrade_store"]


def upgrade_store(url: str, wrote: Callable[[str, int], object] = lambda table, rows: None) -> bool:
    """Reads a store that an earlier release wrote, and writes it as this release keeps it. Killed, it is repeated.

    Of a store that is split over several Redis servers all shards are written at the newest version that every one of
    them has.

    Args:
        url: As of `open_store`: `file:///folder`, `redis://...`, or `token:` or `encoding:` of several.
        wrote: Is told the table and how many rows of it were written, block by block.

    Returns:
        Whether there was anything to do.

    Raises:
        BadInput: no store at such a URL can be of an earlier release.
        StoreFailed: it is in use, or cannot be written.
        StoreBroken: rows are lost, or a commit broke off and cannot be taken back; nothing was removed.
    """
    shards = shard_urls(url)[1] or [url]
    others = [shard for shard in shards if shard.partition("://")[0] not in ("file", *SCHEMES)]
    if others:
        raise BadInput(
            f"a store at {others[0].partition('://')[0]!r} keeps nothing of an earlier release: give file:///folder, "
            "redis://host:port, or token: or encoding: of several of them"
        )
    folders = [_folder(shard) for shard in shards if shard.startswith("file:")]
    with ExitStack() as opened:
        places = [RedisPlace(RedisUrl.parse(shard)) for shard in shards if not shard.startswith("file:")]
        for place in places:
            opened.callback(place.close)
        versions = [version for version in map(current_version, places) if version is not None]
        version = min(versions, default=None) if len(places) > 1 else None
        upgraded = [upgrade_folder(folder, _rows_in, wrote) for folder in folders]
        return any(upgraded + [upgrade_redis(place, version, wrote) for place in places])


def _folder(url: str) -> Path:
    folder = unquote(url.removeprefix("file://").partition("?")[0])
    if not folder.startswith("/") or folder == "/":
        raise BadInput(f"store {url!r}: write file:///folder, with three slashes, for the folder /folder")
    return Path(folder)


def _rows_in(folder: Path) -> FileTier:
    return FileTier(folder / "rows")
