"""A server that lost what it had confirmed is an error that names table and partition, never "no record"."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import redis
from redis.crc import key_slot

from elastable.embedding_store.contract.tier import Records
from elastable.embedding_store.errors import StoreBroken, StoreFailed, TakenOver
from elastable.embedding_store.tiers.redis.record_transfer import LostPartition
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from elastable.embedding_store.tiers.redis.schema import partition_of, rows_key
from tests.embedding_store.tiers.redis.tier_samples import IDS, TABLE, begin, changed, read_back, rows_of
from tests.servers import Server

pytestmark = pytest.mark.process

_CAUSES = r"restarted without persistence or with an older file.*flushed.*evict keys"


@pytest.fixture
def tier(redis_url: str) -> Iterator[RedisTier]:
    with RedisTier(f"{redis_url}?partitions=8") as tier:
        begin(tier)
        tier.put_state(b"one")
        yield tier


@pytest.fixture
def client(redis_node: Server) -> Iterator[redis.Redis]:
    with redis_node.client() as client:
        yield client


ACTS: dict[str, Callable[[RedisTier], object]] = {
    "read": read_back,
    "write": lambda tier: tier.write(changed(2), {}, 2),
    "delete": lambda tier: tier.write([], {"t": (IDS, IDS)}, 2),
    "tables": lambda tier: tier.tables(),
    "scan": lambda tier: list(tier.scan("t")),
}


@pytest.mark.parametrize("act", ACTS)
def test_a_partition_that_is_gone(tier: RedisTier, client: redis.Redis, redis_url: str, act: str) -> None:
    client.delete(rows_key("elastable", "t", 3))
    with pytest.raises(LostPartition, match=rf"partition 3 of table 't'.*{_CAUSES}"):
        ACTS[act](tier)
    # Whatever was tried, a later process finds out, too.
    with RedisTier(redis_url) as later, pytest.raises(LostPartition, match="partition 3 of table 't'"):
        later.tables()


@pytest.mark.parametrize("act", ["write", "delete"])
def test_a_partition_gone_between_two_writes(tier: RedisTier, client: redis.Redis, redis_url: str, act: str) -> None:
    """The second write gives the partition a stamp again, and lets everybody know that it was lost."""
    tier.write(changed(2), {}, 2)
    client.delete(rows_key("elastable", "t", 3))
    if act == "write":
        client.hset(rows_key("elastable", "t", 3), "x" * 8, "y")
    with pytest.raises(LostPartition, match=r"partition 3 of table 't'.*its hash has no stamp"):
        ACTS[act](tier)
    assert client.hget(rows_key("elastable", "t", 3), "stamp") is not None
    with RedisTier(redis_url) as later, pytest.raises(LostPartition, match="a writer found it gone, and wrote to it"):
        later.tables()
    # The way on: tables are made anew, from a checkpoint.
    with RedisTier(redis_url) as restored:
        restored.drop("t")
        restored.create(TABLE)
        restored.write(changed(3), {}, 3)
        assert set(restored.tables()) == {"t"}
        np.testing.assert_array_equal(read_back(restored), rows_of(3))


@pytest.mark.parametrize("act", ["read", "write", "tables"])
def test_a_partition_that_came_back_older(tier: RedisTier, client: redis.Redis, redis_url: str, act: str) -> None:
    key = rows_key("elastable", "t", 5)
    older = client.dump(key)
    assert older is not None
    tier.write(changed(2), {}, 2)
    tier.put_state(b"two")
    client.restore(key, 0, older, replace=True)
    behind = "partition 5 of table 't': its last write is that of sequence 1, and one of sequence 2 was confirmed"
    with RedisTier(redis_url) as later, pytest.raises(LostPartition, match=behind):
        ACTS[act](later)
    if act != "write":
        with pytest.raises(LostPartition, match=behind):
            ACTS[act](tier)


def test_a_partition_that_is_newer_than_the_state(tier: RedisTier, redis_url: str) -> None:
    """What was written since: nothing is lost, and `sequence` tells."""
    tier.write(changed(2, IDS[partition_of(IDS, 8) == 3]), {}, 2)
    with RedisTier(redis_url) as later:
        assert set(later.tables()) == {"t"}
        assert later.sequence == 2
        assert later.state() == b"one"


@pytest.mark.parametrize("act", ACTS)
def test_a_server_that_was_flushed(tier: RedisTier, client: redis.Redis, act: str) -> None:
    client.flushall()
    with pytest.raises(StoreBroken, match=rf"lost.*{_CAUSES}"):
        ACTS[act](tier)
    with pytest.raises(TakenOver, match="nobody any more"):
        tier.put_state(b"two")


@pytest.mark.parametrize("key", ["tables", "state"])
def test_a_registry_or_a_state_that_is_gone(tier: RedisTier, client: redis.Redis, redis_url: str, key: str) -> None:
    client.delete(f"{{elastable}}:tier:{key}")
    with RedisTier(redis_url) as later:
        with pytest.raises(StoreBroken, match=rf"has lost its {'registry of tables' if key == 'tables' else 'state'}"):
            later.tables()
        with pytest.raises(StoreBroken, match="has lost its"):
            read_back(later)
    with pytest.raises(StoreBroken, match="has lost its"):
        tier.tables()


def test_records_of_a_lost_registry_are_no_new_table(tier: RedisTier, client: redis.Redis, redis_url: str) -> None:
    client.delete("{elastable}:tier:tables", "{elastable}:tier:state")
    with RedisTier(f"{redis_url}?partitions=8") as later:
        with pytest.raises(StoreBroken, match=r"holds records of a table 't'.*the server has lost the registry"):
            later.create(TABLE)
        later.drop("t")
        later.create(TABLE)
        (missing,) = later.read([Records("t", IDS, IDS, np.zeros((len(IDS), 16), np.uint8))])
        assert len(missing) == len(IDS)


def test_a_node_of_a_cluster_that_was_flushed(redis_cluster_nodes: list[Server], redis_cluster_url: str) -> None:
    with RedisTier(redis_cluster_url) as tier:
        begin(tier)
        tier.put_state(b"one")
    home = key_slot(b"{elastable}") * 3 // 16_384
    for number, server in enumerate(redis_cluster_nodes):
        if number != home:
            with server.client() as client:
                client.flushall()
            break
    with RedisTier(redis_cluster_url) as later, pytest.raises(LostPartition, match=r"partition \d+ of table 't'"):
        later.tables()


def test_a_restart_without_persistence(fleeting: Server) -> None:
    with RedisTier(fleeting.url) as tier, RedisTier(fleeting.url) as reader:
        begin(tier)
        read_back(reader)
        fleeting.kill()
        fleeting.start()
        with pytest.raises(StoreBroken, match=rf"lost.*{_CAUSES}"):
            read_back(reader)
        with pytest.raises(TakenOver, match="nobody any more"):
            tier.write(changed(2), {}, 2)


def test_an_older_file_is_restored(durable: Server, tmp_path: Path) -> None:
    """The whole server is older: who wrote, knows; who opens it, finds the store as it was."""
    with RedisTier(durable.url) as tier:
        begin(tier)
        tier.put_state(b"one")
        durable.kill()
        shutil.copytree(durable.directory, tmp_path / "older")
        durable.start()
        tier.write(changed(2, IDS[:9]), {}, 2)
        durable.kill()
        shutil.rmtree(durable.directory / "appendonlydir")
        shutil.copytree(tmp_path / "older" / "appendonlydir", durable.directory / "appendonlydir")
        durable.start()
        lost = "its last write is that of sequence 1, and one of sequence 2 was confirmed"
        with pytest.raises(LostPartition, match=lost):
            tier.write(changed(3), {}, 3)
        with pytest.raises(LostPartition, match=lost):
            read_back(tier)


def test_a_server_that_is_full_refuses(any_server_url: str) -> None:
    node = any_server_url.removeprefix("redis://").split(",")[0]
    with RedisTier(f"{any_server_url}?partitions=16") as tier, redis.Redis.from_url(f"redis://{node}") as client:
        begin(tier)
        client.config_set("maxmemory", "1mb")
        try:
            with pytest.raises(StoreFailed, match=r"OOM.*raise its maxmemory"):
                tier.write(changed(2), {}, 2)
        finally:
            client.config_set("maxmemory", 0)
        tier.write(changed(2), {}, 2)
        np.testing.assert_array_equal(read_back(tier), rows_of(2))
