"""Rows that an earlier release left in Redis are read as they were, commits that broke off included."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import redis

from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import StaleVersion, StoreBroken
from elastable.embedding_store.tiers.redis.earlier_schema import EarlierRedis, earlier_tables, registry_key
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from tests.contracts.store_samples import rows_by_id
from tests.embedding_store.earlier_release.earlier_stores import (
    IN_ORDER,
    NAMESPACE,
    VERSION,
    commit_of,
    fill_redis,
    rows_of_release,
)

DTYPES = {"brain": "bfloat16", "cities": "float32", "people": "float16", "small": "int8", "words": "float32"}


@pytest.fixture(params=["redis_url", "redis_cluster_url"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


@pytest.fixture
def place(url: str) -> Iterator[RedisPlace]:
    made = RedisPlace(url)
    yield made
    made.close()


def earlier(place: RedisPlace, version: int | None = None) -> EarlierRedis:
    return EarlierRedis(place.topology, NAMESPACE, 10.0, version)


def numbers(store: EarlierRedis, table: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids, weights and slots, by id."""
    blocks = list(store.rows(table, 7))
    assert all(len(ids) <= 7 for ids, _ in blocks)
    ids, rows = np.concatenate([block[0] for block in blocks]), np.concatenate([block[1] for block in blocks])
    order, spec = np.argsort(ids), store.tables[table].spec
    weights, slots = np.split(rows[order], [spec.weight_bytes], axis=1)
    return ids[order], unpacked(np.ascontiguousarray(weights), DTYPES[table]), np.ascontiguousarray(slots).view("<f4")


def unpacked(packed: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "int8":
        scale = np.ascontiguousarray(packed[:, -4:]).view("<f4")
        return packed[:, :-4].view(np.int8).astype(np.float32) * scale
    if dtype == "bfloat16":
        return (packed.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return packed.view({"float16": "<f2", "float32": "<f4"}[dtype]).astype(np.float32)


@pytest.mark.parametrize("state", ["whole", "broken off", "pinned"])
def test_every_row_is_read_as_it_was(url: str, place: RedisPlace, state: str) -> None:
    assert earlier_tables(place.topology, NAMESPACE, place.deadline()) == 0
    fill_redis(url, state)
    store, expected = earlier(place), rows_of_release("redis")
    assert earlier_tables(place.topology, NAMESPACE, place.deadline()) == 5
    assert (store.version, store.record()) == (VERSION, b"record of version 5")
    assert list(store.tables) == sorted(DTYPES)
    for number, table in enumerate(store.tables):
        ids, weights, slots = numbers(store, table)
        np.testing.assert_array_equal(ids, expected[f"{number}_ids"])
        np.testing.assert_array_equal(weights, expected[f"{number}_weights"])
        np.testing.assert_array_equal(slots, expected[f"{number}_slots"].reshape(len(ids), -1))


def test_a_first_commit_that_broke_off_left_nothing(url: str, place: RedisPlace) -> None:
    fill_redis(url, "first broken off")
    store = earlier(place)
    assert (store.version, store.record()) == (0, None)
    assert [list(store.rows(table)) for table in store.tables] == [[]] * 5


def test_the_version_before_is_read_where_a_shard_is_ahead_of_others(url: str, place: RedisPlace) -> None:
    fill_redis(url, "whole")
    store = earlier(place, VERSION - 1)
    assert store.record() == b"record of version 4"
    specs = [store.tables[name].spec for name in IN_ORDER if name in store.tables]
    with MemoryStore(threads=1) as expected:
        for spec in specs:
            expected.create_table(spec)
        for version in range(1, VERSION):
            expected.commit(commit_of(version, specs))
        for spec in specs:
            ids, weights, slots = numbers(store, spec.name)
            if spec.dtype != "int8":
                there = rows_by_id(expected, spec.name)
                assert list(there)
                assert sorted(there) == ids.tolist()
                assert [there[one] for one in ids.tolist()] == [
                    (row.tobytes(), beside.tobytes()) for row, beside in zip(weights, slots, strict=True)
                ]
    with pytest.raises(StaleVersion, match="is at version 5 and cannot be read at version 3"):
        earlier(place, VERSION - 2)
    place.topology.call([(registry_key(NAMESPACE), ("SET", b"{elastable}:serial", 7))], place.deadline())
    with pytest.raises(StaleVersion, match="cannot be read at version 4"):  # rows were put since
        earlier(place, VERSION - 1)


def spoil(client: redis.Redis, key: bytes, field: bytes, value: bytes | None) -> None:
    if value is None:
        assert client.hdel(key, field)
    else:
        client.hset(key, field, value)


@pytest.mark.parametrize(
    ("key", "field", "value", "said"),
    [
        ("{elastable:cities:1}:weights", b"version", None, "partition 1 of table 'cities'.* is lost"),
        ("{elastable:cities:1}:weights", b"version", b"x", "partition 1 of table 'cities'.* is lost"),
        ("{elastable:cities:0}:weights", bytes(8), b"short", "lost slots of rows|are no rows of"),
        ("{elastable:cities:0}:slots", bytes(8), b"short", "lost slots of rows|are no rows of"),
        ("{elastable}:tables", b"cities", b"{}", "holds b'{}', no table"),
        ("{elastable}:tables", b"cities", b"[1]", "no table"),
    ],
)
def test_what_is_lost_or_corrupt_is_named(
    redis_url: str, key: str, field: bytes, value: bytes | None, said: str
) -> None:
    fill_redis(redis_url, "whole")
    with redis.Redis.from_url(redis_url) as client:
        spoil(client, key.encode(), field, value)
    place = RedisPlace(redis_url)
    try:
        with pytest.raises(StoreBroken, match=said):
            list(earlier(place).rows("cities"))
    finally:
        place.close()


def test_a_commit_that_cannot_be_taken_back_is_refused(redis_url: str) -> None:
    fill_redis(redis_url, "broken off")
    place = RedisPlace(redis_url)
    try:
        with redis.Redis.from_url(redis_url) as client:
            for key in client.scan_iter("*}:before"):
                for field, value in client.hgetall(key).items():
                    if len(field) == 16:
                        client.hset(key, field, value[:-1])
        with pytest.raises(StoreBroken, match=r"a before-image in partition .* is corrupt: go back to a checkpoint"):
            read_all(place)
        with redis.Redis.from_url(redis_url) as client:
            client.delete(*client.scan_iter("*}:before"))
        with pytest.raises(StoreBroken, match=r"a commit of version 6 broke off in partition \d .* is gone: go back"):
            read_all(place)
    finally:
        place.close()


def read_all(place: RedisPlace) -> None:
    store = earlier(place)
    for table in store.tables:
        list(store.rows(table))
