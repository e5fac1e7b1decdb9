"""Keys are as documented: another client finds every row by the schema alone."""

import json

import numpy as np
import pytest
import redis
from redis.crc import key_slot

from elastable.embedding_store import Commit, OptimizerSpec, TableSpec, TableUpdate
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.tiers.redis.schema import (
    check_namespace,
    partition_of,
    rows_key,
)
from tests.embedding_store.tiers.redis.tier_samples import checked


def test_mixing_is_splitmix64() -> None:
    # Outputs 1, 2 of splitmix64 seeded with 0 (Vigna's reference, https://prng.di.unimi.it/splitmix64.c):
    # the finalizer of multiples of the golden gamma.
    gamma = 0x9E3779B97F4A7C15
    outputs = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    ids = np.array([gamma, 2 * gamma % 2**64], np.uint64).view(np.int64)
    assert partition_of(ids, 65_536).tolist() == [output % 65_536 for output in outputs]


def test_partitions_are_even() -> None:
    for ids in (np.arange(64_000), np.arange(64_000) * 2**40, -np.arange(64_000)):
        counts = np.bincount(partition_of(ids, 64), minlength=64)
        assert counts.min() > 800
        assert counts.max() < 1200


@pytest.mark.parametrize("key", [b"a", b"{a}b", b"a{b}c{d}", b"{}a", b"a{b", rows_key("n", "t\u00fc", 3)])
def test_hash_slot_is_the_servers(redis_cluster_url: str, key: bytes) -> None:
    port = int(redis_cluster_url.rsplit(":", 1)[1])
    with redis.Redis(port=port) as client:
        assert key_slot(key) == client.execute_command("CLUSTER KEYSLOT", key)


def test_a_row_is_found_by_the_schema_alone(redis_url: str) -> None:
    spec = TableSpec("users", 3, None, optimizer=OptimizerSpec.of("adagrad"))
    ids = np.array([5, -7, 2**62], np.int64)
    with open_store(f"{redis_url}?namespace=job&partitions=4") as store:
        assert store.create_table(spec)
        store.commit(Commit(1, {"users": TableUpdate(ids, np.ones((3, 3), np.float32))}, 0, {}))
        (block,) = store.scan("users")
        rows = {int(one): (block.weights[at], block.slots[at]) for at, one in enumerate(block.ids)}
    with redis.Redis.from_url(redis_url) as client:
        assert client.hkeys("{job}:tier:tables") == [b"users"]
        record = json.loads(client.hget("{job}:tier:tables", "users"))
        assert (record["schema"], record["partitions"], record["record_bytes"]) == (3, 4, 24)
        assert client.xlen("{job}:log") <= 1  # trimmed as the store was closed
        partitions = {int(one): int(partition_of(np.array([one]), 4)[0]) for one in ids}
        for one, partition in partitions.items():
            field = one.to_bytes(8, "little", signed=True)
            weights, slots = (part.astype("<f4").tobytes() for part in rows[one])
            assert client.hget(f"{{job:users:{partition}}}:rows", field) == checked(one, weights + slots)
        for partition in range(4):
            held = sum(its == partition for its in partitions.values())
            assert client.hlen(f"{{job:users:{partition}}}:rows") == held + 1
            stamp = int.from_bytes(client.hget(f"{{job:users:{partition}}}:rows", "stamp"), "little")
            assert (stamp > 0) == (held > 0)
        expected = {f"{{job:users:{partition}}}:rows" for partition in range(4)}
        expected |= {f"{{job}}:{name}" for name in ("tier:tables", "tier:state", "owner", "log")}
        assert {key.decode() for key in client.scan_iter()} == expected


def test_an_existing_table_keeps_its_partitions(redis_url: str) -> None:
    spec = TableSpec("t", 2)
    ids, ones = np.arange(50), np.ones((50, 2), np.float32)
    with open_store(f"{redis_url}?partitions=2") as two:
        assert two.create_table(spec)
        two.commit(Commit(1, {"t": TableUpdate(ids, ones)}, 0, {}))
        rows = two.lookup({"t": ids})["t"]
    with open_store(f"{redis_url}?partitions=8") as eight, redis.Redis.from_url(redis_url) as client:
        assert not eight.create_table(spec)
        np.testing.assert_array_equal(eight.lookup({"t": ids})["t"], rows)
        assert eight.row_count("t") == 50
        assert len(client.keys("{elastable:t:*}:rows")) == 2


@pytest.mark.parametrize("namespace", ["", "a b", "{a}", "a:b", "x" * 101])
def test_a_namespace_fits_into_a_key(namespace: str) -> None:
    with pytest.raises(BadInput, match="namespace"):
        check_namespace(namespace)
