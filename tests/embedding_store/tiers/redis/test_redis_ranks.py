"""Ranked tables in Redis: the records of lowest rank, in order, whatever was written, deleted, moved or lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.tier import END_OF_RANKS, Records, TierTable
from elastable.embedding_store.errors import BadInput, StoreBroken
from elastable.embedding_store.tiers.redis.namespace_keys import delete_namespace
from elastable.embedding_store.tiers.redis.records import record_ranks
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from elastable.embedding_store.tiers.redis.schema import partition_of, ranks_key

RANKED = TierTable("t", 16, ranked=True)
EXTREME = [-(2**63), -(2**63) + 1, -1, 0, 1, 2**63 - 1]

Ranks = dict[int, int]


@pytest.fixture(params=["redis_url", "valkey_url", "redis_cluster_url"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    return found


def records(ranks: Ranks) -> Records:
    """Records that hold their ranks."""
    ids = np.array(list(ranks), np.int64)
    kept = np.array(list(ranks.values()), np.int64)
    return Records("t", ids, ids, np.repeat(kept, 2).view(np.uint8).reshape(-1, 16), kept)


def ranks_of(block: Records) -> Int64:
    kept: Int64 = block.rows.view(np.int64)[:, 1].copy()
    return kept


def unranked(block: Records) -> Records:
    return Records(block.table, block.ids, block.positions, block.rows)


def in_order(ranks: Ranks, low: int = 0, high: int = END_OF_RANKS) -> list[tuple[int, int]]:
    found = [(one, rank) for one, rank in ranks.items() if low <= rank < high]
    return sorted(found, key=lambda pair: (pair[1], -pair[0]))


def lowest(tier: RedisTier, low: int = 0, high: int = END_OF_RANKS, most: int | None = None) -> list[tuple[int, int]]:
    ids, ranks = tier.lowest("t", low, high, most)
    assert ids.dtype == ranks.dtype == np.int64
    return list(zip(ids.tolist(), ranks.tolist(), strict=True))


@pytest.fixture
def tier(url: str) -> Iterator[RedisTier]:
    with RedisTier(f"{url}?partitions=8") as tier:
        tier.create(RANKED)
        yield tier


def test_an_empty_table_has_no_lowest_records(tier: RedisTier) -> None:
    assert lowest(tier) == lowest(tier, 0, 5, 3) == []


@pytest.mark.parametrize("at_once", [1 << 16, 40])
def test_records_come_by_rank_and_of_equal_ranks_the_greater_id_first(
    tier: RedisTier, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_ranks, "_AT_ONCE", at_once)
    random = np.random.default_rng(1)
    ids = [*EXTREME, *random.integers(-(2**62), 2**62, 1500).tolist()]
    ranks = dict(zip(ids, random.choice([0, 1, 2, 10**9, 2**52, 2**52 + 1, 2**53 - 1], len(ids)).tolist(), strict=True))
    tier.write([records(ranks)], {}, 1)
    assert lowest(tier) == in_order(ranks)
    for most in (0, 1, 7, 200, 1499, 5000):
        assert lowest(tier, most=most) == in_order(ranks)[:most]
        assert lowest(tier, 1, 2**52 + 1, most) == in_order(ranks, 1, 2**52 + 1)[:most]
    assert lowest(tier, 3, 10**9) == []


def test_one_partition_may_hold_all_of_the_lowest(tier: RedisTier) -> None:
    """Each partition is asked for its share first, and for more as long as it may have some."""
    ids = np.arange(4000)
    old = partition_of(ids, 8) == 3
    ranks = {int(one): int(one) if is_old else 10_000 for one, is_old in zip(ids, old, strict=True)}
    tier.write([records(ranks)], {}, 1)
    for most in (1, 100, int(old.sum()), int(old.sum()) + 50):
        assert lowest(tier, most=most) == in_order(ranks)[:most]


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    writes=st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from([*EXTREME, *range(2, 12)]), st.integers(0, 4), max_size=6),
            st.lists(st.sampled_from([*EXTREME, *range(2, 12)]), max_size=4, unique=True),
            st.sampled_from(["ranked", "ranked", "ranked", "not ranked", "ranked anew", "another process"]),
        ),
        max_size=8,
    )
)
def test_any_writes(redis_url: str, writes: list[tuple[Ranks, list[int], str]]) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    place = f"{redis_url}?partitions=2"
    tier = RedisTier(place)
    try:
        tier.create(RANKED)
        kept: Ranks = {}
        for number, (changed, gone, what) in enumerate(writes, 1):
            deleted = {"t": (np.array(gone, np.int64), np.array(gone, np.int64))} if gone else {}
            block = records(changed)
            tier.write([unranked(block) if what == "not ranked" else block], deleted, number)
            kept = {one: rank for one, rank in kept.items() if one not in gone} | changed
            if what == "another process":
                tier.close()
                tier = RedisTier(place)
                tier.take_over()
            if not tier.tables()["t"].ranked or what == "ranked anew":
                with pytest.raises(BadInput, match="no ranked one") if what == "not ranked" else nullcontext():
                    lowest(tier)
                tier.rank("t", ranks_of)
            assert tier.tables()["t"].ranked
            assert lowest(tier) == in_order(kept)
    finally:
        tier.close()


def test_a_table_that_was_written_without_ranks_is_ranked(tier: RedisTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_ranks, "_AT_ONCE", 300)
    ranks = {one: one % 7 for one in range(-1000, 1000)}
    tier.write([unranked(records(ranks))], {}, 1)
    assert not tier.tables()["t"].ranked
    tier.rank("t", ranks_of)
    assert lowest(tier) == in_order(ranks)
    ranks |= dict.fromkeys(range(10), 100)
    tier.write([records(dict.fromkeys(range(10), 100))], {"t": (np.array([77]), np.array([77]))}, 2)
    del ranks[77]
    assert lowest(tier) == in_order(ranks)
    tier.drop("t")
    tier.create(RANKED)
    assert lowest(tier) == []


def test_ranks_that_no_record_can_have(tier: RedisTier) -> None:
    for rank in (-1, END_OF_RANKS):
        with pytest.raises(BadInput, match="ranks that no record can have"):
            tier.write([records({1: rank})], {}, 1)


@pytest.mark.parametrize("how", ["evicted", "a member"])
def test_ranks_that_are_lost_are_noticed(redis_url: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_ranks, "_PAUSE_S", 0.0)
    with RedisTier(f"{redis_url}?partitions=2") as tier, redis.Redis.from_url(redis_url) as client:
        tier.create(RANKED)
        tier.write([records({one: one for one in range(50)})], {}, 1)
        if how == "evicted":
            client.delete(ranks_key("elastable", "t", 1))
        else:
            client.zpopmax(ranks_key("elastable", "t", 1))
        with pytest.raises(StoreBroken, match=r"lost data of partition 1 of table 't': its hash has \d+ fields, and"):
            lowest(tier)
        tier.write([records({one: one for one in range(50, 60)})], {}, 2)  # which begins the set anew
        with pytest.raises(StoreBroken, match="have ranks"):
            lowest(tier)


def test_every_key_of_a_namespace_is_deleted(redis_url: str) -> None:
    with RedisTier(f"{redis_url}?partitions=2") as tier:
        tier.create(RANKED)
        tier.write([records({1: 1, 2: 2})], {}, 1)
    place = RedisPlace(redis_url)
    with redis.Redis.from_url(redis_url) as client:
        client.delete("{elastable:t:0}:rows")  # its ranks are found all the same
        delete_namespace(place)
        assert [key for key in client.scan_iter() if key != b"{elastable}:owner"] == []
    place.close()


def test_records_are_ranked_while_others_are_written(tier: RedisTier) -> None:
    """Those that are not written meanwhile are there, each once, in order."""
    still = {one: one % 5 for one in range(0, 1000, 2)}
    tier.write([records(still | dict.fromkeys(range(1, 1000, 2), 0))], {}, 1)
    failures, stop = list[str](), threading.Event()

    def read() -> None:
        while not stop.is_set():
            found = [pair for pair in lowest(tier, most=400) if pair[0] % 2 == 0]
            if found != in_order(still)[: len(found)]:
                failures.append(str(found))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(2, 40):
        some = range(1, 1000, 2)[number % 2 :: 2]
        gone = np.array(range(1, 1000, 2)[number % 2 + 1 :: 4])
        tier.write([records(dict.fromkeys(some, number))], {"t": (np.setdiff1d(gone, some), gone)}, number)
    stop.set()
    reader.join(60)
    assert not reader.is_alive()
    assert failures == []
