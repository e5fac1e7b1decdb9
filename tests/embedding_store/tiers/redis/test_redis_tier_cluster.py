"""Slots that move between the nodes of a Cluster are followed by the tier, in the middle of a migration too."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from elastable.embedding_store.contract.tier import TierTable
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from elastable.embedding_store.tiers.redis.schema import hash_slot, rows_key, tier_state_key
from tests.embedding_store.tiers.redis.slot_migration import Migration
from tests.embedding_store.tiers.redis.tier_samples import IDS, TABLE, changed, read_back, rows_of
from tests.servers import Server

GONE = IDS[:50]


@pytest.fixture
def tier(redis_cluster_url: str) -> Iterator[RedisTier]:
    with RedisTier(redis_cluster_url) as tier:
        tier.create(TABLE)
        tier.write(changed(1), {}, 1)
        yield tier


@pytest.fixture
def migration(redis_cluster_nodes: list[Server]) -> Iterator[Migration]:
    """Of the slot of partition 11."""
    migration = Migration(redis_cluster_nodes, hash_slot(rows_key("elastable", "t", 11)))
    yield migration
    migration.finish()
    migration.close()


def write_and_delete(tier: RedisTier, sequence: int) -> None:
    """Deletes some rows, and writes them and all others anew."""
    tier.write([], {"t": (GONE, GONE)}, sequence)
    tier.write(changed(sequence), {"t": (GONE, GONE)}, sequence)


def test_records_are_on_every_node(tier: RedisTier, redis_cluster_nodes: list[Server]) -> None:
    for server in redis_cluster_nodes:
        with server.client() as client:
            assert client.dbsize() > 10


def test_a_moved_slot(tier: RedisTier, migration: Migration, redis_cluster_url: str) -> None:
    with RedisTier(redis_cluster_url) as reader:
        np.testing.assert_array_equal(read_back(reader), rows_of(1))
        migration.begin()
        migration.finish()
        np.testing.assert_array_equal(read_back(reader), rows_of(1))
        write_and_delete(tier, 2)
        np.testing.assert_array_equal(read_back(reader), rows_of(2))
        assert set(reader.tables()) == {"t"}


@pytest.mark.parametrize("moved", ["nothing", "everything"])
def test_a_slot_on_its_way(tier: RedisTier, migration: Migration, moved: str) -> None:
    migration.begin()
    for key in migration.keys_left() if moved == "everything" else ():
        migration.move(key)
    np.testing.assert_array_equal(read_back(tier), rows_of(1))
    assert sum(len(block.ids) for block in tier.scan("t")) == len(IDS)
    write_and_delete(tier, 2)
    np.testing.assert_array_equal(read_back(tier), rows_of(2))
    assert tier.sequence == 2
    migration.finish()
    write_and_delete(tier, 3)
    np.testing.assert_array_equal(read_back(tier), rows_of(3))
    assert set(tier.tables()) == {"t"}


RANKED = TierTable("ranked", 16, ranked=True)


def ranked_write(tier: RedisTier, sequence: int) -> None:
    """Deletes some rows of a ranked table, and writes them and all others anew, the last of them first in rank."""
    (rows,) = changed(sequence)
    tier.write([], {"ranked": (GONE, GONE)}, sequence)
    tier.write([replace(rows, table="ranked", ranks=sequence * 1000 - rows.ids)], {}, sequence)


@pytest.mark.parametrize("moved", ["nothing", "one key", "everything"])
def test_the_slot_of_a_ranked_table_on_its_way(tier: RedisTier, redis_cluster_nodes: list[Server], moved: str) -> None:
    """Where one of a partition's two keys has moved, its commands are repeated until the slot has an owner again."""
    tier.create(RANKED)
    ranked_write(tier, 2)
    migration = Migration(redis_cluster_nodes, hash_slot(rows_key("elastable", "ranked", 11)))
    try:
        migration.begin()
        left = migration.keys_left()
        assert len(left) == 2
        for key in {"nothing": [], "one key": left[:1], "everything": left}[moved]:
            migration.move(key)
        finishing = threading.Timer(0.2, migration.finish) if moved == "one key" else None
        if finishing is not None:
            finishing.start()
        for sequence in (3, 4):
            ranked_write(tier, sequence)
            ids, ranks = tier.lowest("ranked", 0, 10_000, 100)
            assert ids.tolist() == IDS[::-1][:100].tolist()
            np.testing.assert_array_equal(ranks, sequence * 1000 - ids)
        if finishing is not None:
            finishing.join()
    finally:
        migration.finish()
        migration.close()
    assert len(tier.lowest("ranked", 0, 10_000)[0]) == len(IDS)


def test_a_slot_that_moves_while_rows_are_written_and_read(tier: RedisTier, migration: Migration) -> None:
    def move() -> None:
        migration.begin()
        migration.finish()

    moving = threading.Thread(target=move)
    moving.start()
    sequence = 1
    while moving.is_alive() or sequence < 4:
        sequence += 1
        write_and_delete(tier, sequence)
        np.testing.assert_array_equal(read_back(tier), rows_of(sequence))
    moving.join()
    assert tier.sequence == sequence


def test_the_slot_of_the_registry_moves(tier: RedisTier, redis_cluster_nodes: list[Server]) -> None:
    """With the owner's key, the state and the log."""
    tier.put_state(b"one")
    migration = Migration(redis_cluster_nodes, hash_slot(tier_state_key("elastable")))
    try:
        migration.begin()
        assert tier.state() == b"one"
        for key in migration.keys_left():
            migration.move(key)
        assert tier.state() == b"one"
        migration.finish()
        tier.put_state(b"two")
        assert tier.state() == b"two"
        tier.require_owner()
        tier.take_over()
        tier.write(changed(2), {}, 2)
        assert set(tier.tables()) == {"t"}
    finally:
        migration.finish()
        migration.close()


def test_a_state_is_put_while_its_slot_moves(tier: RedisTier, redis_cluster_nodes: list[Server]) -> None:
    """WATCH, MULTI and EXEC meet keys of which some have moved: they are tried until the slot has an owner again."""
    migration = Migration(redis_cluster_nodes, hash_slot(tier_state_key("elastable")))
    try:
        migration.begin()
        migration.move(tier_state_key("elastable"))
        finishing = threading.Timer(0.2, migration.finish)
        finishing.start()
        tier.put_state(b"two")
        finishing.join()
        assert tier.state() == b"two"
    finally:
        migration.finish()
        migration.close()
