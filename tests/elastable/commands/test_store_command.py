"""`elastable store upgrade` on what the last release left."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from typer.testing import CliRunner

from elastable.command import app
from elastable.embedding_store.errors import BadInput, StaleVersion
from elastable.embedding_store.support.store_url import shard_urls
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from tests.embedding_store.earlier_release.earlier_stores import file_store, fill_redis, rows_of_release


def ran(*words: str) -> str:
    result = CliRunner().invoke(app, ("store", *words))
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_a_store_in_redis(redis_url: str) -> None:
    fill_redis(redis_url, "broken off")
    rows = sum(len(ids) for name, ids in rows_of_release("redis").items() if name.endswith("_ids"))
    assert f"is upgraded: {rows} rows of 5 tables written" in ran("upgrade", redis_url)
    assert "holds nothing of an earlier release" in ran("upgrade", redis_url)


def test_a_store_in_files(tmp_path: Path) -> None:
    folder = file_store(tmp_path)
    assert "rows of 7 tables written" in ran("upgrade", f"file://{folder}")
    assert "holds nothing of an earlier release" in ran("upgrade", f"file://{folder}")
    assert (folder / "rows" / "tables").exists()


def test_shards_are_upgraded_at_the_version_that_all_have(redis_url: str, valkey_url: str) -> None:
    url = f"token:{redis_url},{valkey_url}"
    fill_redis(redis_url, "whole")
    fill_redis(valkey_url, "first broken off")
    with pytest.raises(StaleVersion, match="is at version 5 and cannot be read at version 0"):
        ran("upgrade", url)
    with redis.Redis.from_url(valkey_url) as client:
        client.flushall()
    fill_redis(valkey_url, "broken off")
    assert "is upgraded" in ran("upgrade", url)
    for shard in shard_urls(url)[1]:
        place = RedisPlace(shard)
        with RedisTier(place) as tier:
            assert tier.state() is not None
        place.close()


def test_other_urls_are_refused() -> None:
    with pytest.raises(BadInput, match="'grpc' keeps nothing of an earlier release"):
        ran("upgrade", "grpc://127.0.0.1:1")
    with pytest.raises(BadInput, match="three slashes"):
        ran("upgrade", "file://relative")
