"""A store that the last release left in Redis becomes one of this release, wherever the upgrade is killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import pytest
import redis

from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.engine.tiered.store_tier import StoreTier
from elastable.embedding_store.errors import StoreBroken, StoreFailed
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from elastable.embedding_store.tiers.redis.streams.redis_log import RedisLog
from elastable.embedding_store.upgrade.redis_upgrade import current_version, refuse_earlier_redis, upgrade_redis
from tests.embedding_store.dying_writer import Died, dying_after
from tests.embedding_store.earlier_release.earlier_stores import (
    VERSION,
    fill_redis,
    require_as_released,
    require_same_training,
)

_MOST = 400


@pytest.fixture(params=["redis_url", "redis_cluster_url"])
def url(request: pytest.FixtureRequest) -> str:
    return f"{request.getfixturevalue(request.param)}?partitions=2"


@contextmanager
def placed(url: str) -> Iterator[RedisPlace]:
    place = RedisPlace(url)
    try:
        yield place
    finally:
        place.close()


@contextmanager
def opened(url: str) -> Iterator[MemoryStore]:
    with placed(url) as place, MemoryStore(threads=1) as store:
        store.keep_tier(StoreTier(RedisTier(place), RedisLog(place), 1 << 20), every_s=3600.0)
        yield store


def upgraded(url: str, version: int | None = None, wrote: Callable[[str, int], object] = lambda *_: None) -> bool:
    with placed(url) as place:
        return upgrade_redis(place, version, wrote)


def keys(url: str) -> set[str]:
    """Kinds of keys that there are."""
    found: set[str] = set()
    with placed(url) as place:
        for seed in place.url.seeds:
            with redis.Redis(host=seed.host, port=seed.port) as client:
                found |= {key.decode().rpartition("}:")[2] for key in client.scan_iter("*")}
    return found


@pytest.mark.parametrize("state", ["whole", "broken off", "pinned"])
def test_every_row_slot_and_record_is_as_it_was(url: str, state: str) -> None:
    fill_redis(url, state)
    with placed(url) as place:
        assert current_version(place) == VERSION
        with pytest.raises(StoreFailed, match=r"holds 5 tables of an earlier release.*elastable store upgrade URL"):
            refuse_earlier_redis(place)
    written = dict[str, int]()
    assert upgraded(url, wrote=lambda table, rows: written.update({table: written.get(table, 0) + rows}))
    assert not upgraded(url)
    assert keys(url) == {"owner", "rows", "tier:state", "tier:tables"}
    with placed(url) as place:
        refuse_earlier_redis(place)
        assert current_version(place) is None
    with opened(url) as store:
        assert written == {name: store.row_count(name) for name in store.specs()}
        assert (store.version(), store.record()) == (VERSION, b"record of version 5")
        require_as_released(store, "redis")


def test_training_goes_on_to_the_same_bits(url: str) -> None:
    fill_redis(url, "broken off")
    upgraded(url)
    with opened(url) as store:
        require_same_training(store, until=8)
        store.flush()
    with opened(url) as store:
        assert store.version() == 8


def test_a_first_commit_that_broke_off_leaves_empty_tables(url: str) -> None:
    fill_redis(url, "first broken off")
    upgraded(url)
    with opened(url) as store:
        assert (store.version(), store.record()) == (0, None)
        assert {name: store.row_count(name) for name in store.specs()} == dict.fromkeys(store.specs(), 0)
        assert len(store.specs()) == 5


def test_a_shard_that_was_ahead_is_written_at_the_version_before(redis_url: str) -> None:
    fill_redis(redis_url, "whole")
    upgraded(redis_url, VERSION - 1)
    with opened(redis_url) as store:
        assert (store.version(), store.record()) == (VERSION - 1, b"record of version 4")


@pytest.mark.process
def test_killed_at_any_write_it_is_repeated(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{redis_url}?partitions=1"
    for writes in count(1, 3):
        assert writes < _MOST
        with redis.Redis.from_url(redis_url) as client:
            client.flushall()
        fill_redis(url, "broken off")
        try:
            with dying_after(monkeypatch, writes):
                upgraded(url)
            break
        except Died:
            pass
        upgraded(url)
        assert keys(url) == {"owner", "rows", "tier:state", "tier:tables"}
        with opened(url) as store:
            assert (store.version(), store.record()) == (VERSION, b"record of version 5")
            require_as_released(store, "redis")
    assert writes > 20


def test_what_cannot_be_upgraded_is_left_as_it_is(redis_url: str) -> None:
    fill_redis(redis_url, "broken off")
    with redis.Redis.from_url(redis_url) as client:
        client.delete(*client.scan_iter("*}:before"))
        before = {key: client.dump(key) for key in client.scan_iter("*") if not key.endswith(b"}:owner")}
        with pytest.raises(StoreBroken, match=r"a commit of version 6 broke off.*go back to a checkpoint"):
            upgraded(redis_url)
        after = {key: client.dump(key) for key in client.scan_iter("*")}
        assert before.items() <= after.items()


def test_a_store_that_a_job_writes_to_is_not_upgraded(redis_url: str) -> None:
    fill_redis(redis_url, "whole")
    with placed(redis_url) as other:
        other.take_over()
        with pytest.raises(StoreFailed, match=r"in use by .*stop that job first"):
            upgraded(redis_url)


def test_two_stores_in_one_place_are_not_joined(redis_url: str) -> None:
    with opened(redis_url) as store:
        store.reset_version(3)
    fill_redis(redis_url, "whole")
    with pytest.raises(StoreFailed, match="a store of this release and one of an earlier release"):
        upgraded(redis_url)
