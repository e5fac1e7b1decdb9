"""Keys are as documented: another client finds every row by the schema alone."""

from __future__ import annotations

import json

import numpy as np
import pytest
import redis

from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.errors import BadInput, StoreFailed
from elastable.embedding_store.tiers.redis.redis_store import RedisStore
from elastable.embedding_store.tiers.redis.schema import (
    check_namespace,
    check_partitions,
    hash_slot,
    owner_key,
    partition_of,
)
from elastable.embedding_store.tiers.redis.schema_1 import (
    TableRecord,
    before_key,
    before_ledger_key,
    pins_key,
    records_key,
    serial_key,
    slots_key,
    tables_key,
    version_key,
    weights_key,
)


def test_key_names() -> None:
    assert tables_key("job") == b"{job}:tables"
    assert version_key("job") == b"{job}:version"
    assert weights_key("job", "user/emb", 7) == b"{job:user/emb:7}:weights"
    assert slots_key("job", "user/emb", 7) == b"{job:user/emb:7}:slots"
    assert before_key("job", "user/emb", 7) == b"{job:user/emb:7}:before"
    assert records_key("job") == b"{job}:records"
    assert owner_key("job") == b"{job}:owner"
    assert serial_key("job") == b"{job}:serial"
    assert pins_key("job") == b"{job}:pins"
    assert before_ledger_key("job") == b"{job}:before"


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


@pytest.mark.parametrize("key", [b"a", b"{a}b", b"a{b}c{d}", b"{}a", b"a{b", weights_key("n", "t\u00fc", 3)])
def test_hash_slot_is_the_servers(redis_cluster_url: str, key: bytes) -> None:
    port = int(redis_cluster_url.rsplit(":", 1)[1])
    with redis.Redis(port=port) as client:
        assert hash_slot(key) == client.execute_command("CLUSTER KEYSLOT", key)


def test_a_row_is_found_by_the_schema_alone(redis_url: str) -> None:
    spec = TableSpec("users", 3, None, optimizer=OptimizerSpec.of("adagrad"))
    ids = np.array([5, -7, 2**62], np.int64)
    with RedisStore(f"{redis_url}?namespace=job&partitions=4") as store:
        assert store.create_table(spec)
        store.commit(Commit(1, {"users": TableUpdate(ids, np.ones((3, 3), np.float32))}, 0, {}))
        rows = store.lookup({"users": ids})["users"]
        slots = {
            int(one): row for block in store.scan("users") for one, row in zip(block.ids, block.slots, strict=True)
        }
    with redis.Redis.from_url(redis_url) as client:
        assert client.get("{job}:version") == b"1"
        assert client.hkeys("{job}:tables") == [b"users"]
        record = json.loads(client.hget("{job}:tables", "users"))
        assert (record["partitions"], record["spec"]["name"], record["spec"]["dim"]) == (4, "users", 3)
        for one, row in zip(ids, rows, strict=True):
            partition = int(partition_of(np.array([one]), 4)[0])
            field = int(one).to_bytes(8, "little", signed=True)
            assert client.hget(f"{{job:users:{partition}}}:weights", field) == row.astype("<f4").tobytes()
            assert client.hget(f"{{job:users:{partition}}}:slots", field) == slots[int(one)].astype("<f4").tobytes()
            assert client.hget(f"{{job:users:{partition}}}:weights", "version") == (1).to_bytes(8, "little")
        touched = set(partition_of(ids, 4).tolist())
        for untouched in set(range(4)) - touched:
            assert client.hgetall(f"{{job:users:{untouched}}}:weights") == {b"version": bytes(8)}
        keys = {key.decode() for key in client.scan_iter()}
        expected = {f"{{job:users:{p}}}:weights" for p in range(4)} | {f"{{job:users:{p}}}:slots" for p in touched}
        expected |= {f"{{job:users:{p}}}:before" for p in touched}
        assert keys == expected | {f"{{job}}:{name}" for name in ("tables", "version", "owner", "before")}
        before = client.hgetall(f"{{job:users:{min(touched)}}}:before")
        assert set(before) == {(1).to_bytes(8, "little") + bytes(8), (1).to_bytes(8, "little") + bytes(8) + b"s"}


def test_a_before_image_is_found_by_the_schema_alone(redis_url: str) -> None:
    spec = TableSpec("users", 3, None, optimizer=OptimizerSpec.of("adagrad"))
    with RedisStore(f"{redis_url}?namespace=job&partitions=1") as store, redis.Redis.from_url(redis_url) as client:
        store.create_table(spec)
        for version, ids in ((1, [5, -7]), (2, [-7, 9, 5])):
            gradients = np.ones((len(ids), 3), np.float32)
            rows, slots = (client.hgetall(f"{{job:users:0}}:{kind}") for kind in ("weights", "slots"))
            store.commit(Commit(version, {"users": TableUpdate(np.array(ids), gradients)}, version - 1, {}))
        name = (2).to_bytes(8, "little") + bytes(8)
        value, beside = client.hmget("{job:users:0}:before", name, name + b"s")
        assert np.frombuffer(value, "<i8", 4).tolist() == [1, 2, 1, 1]
        assert np.frombuffer(value, "<i8", 3, 32).tolist() == [-7, 5, 9]
        held = [(one).to_bytes(8, "little", signed=True) for one in (-7, 5)]
        assert value[56:] == b"".join(rows[one] for one in held)
        assert beside == b"".join(slots[one] for one in held)
        assert set(client.hkeys("{job:users:0}:before")) == {name, name + b"s"}


def test_an_existing_table_keeps_its_partitions(redis_url: str) -> None:
    spec = TableSpec("t", 2)
    ids, ones = np.arange(50), np.ones((50, 2), np.float32)
    with RedisStore(f"{redis_url}?partitions=2") as two, RedisStore(f"{redis_url}?partitions=8") as eight:
        assert two.create_table(spec)
        assert not eight.create_table(spec)
        eight.commit(Commit(1, {"t": TableUpdate(ids, ones)}, 0, {}))
        np.testing.assert_array_equal(two.lookup({"t": ids})["t"], eight.lookup({"t": ids})["t"])
        assert two.row_count("t") == 50


def test_namespaces_do_not_meet(redis_url: str) -> None:
    with RedisStore(f"{redis_url}?namespace=a") as a, RedisStore(f"{redis_url}?namespace=b") as b:
        a.create_table(TableSpec("t", 2))
        b.create_table(TableSpec("t", 3))
        a.reset_version(5)
        assert (a.specs()["t"].dim, b.specs()["t"].dim) == (2, 3)
        assert (a.version(), b.version()) == (5, 0)


def test_table_records_round_trip() -> None:
    record = TableRecord(
        TableSpec("t\u00fc", 5, None, seed=-(2**63), optimizer=OptimizerSpec.of("adam", epsilon=1e-7)), 64
    )
    assert TableRecord.from_json(record.to_json()) == record


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"partitions": 3, "spec": {}}', b"\xff"])
def test_a_broken_record_is_named(text: str) -> None:
    with pytest.raises(StoreFailed, match="no table record"):
        TableRecord.from_json(text)


@pytest.mark.parametrize("partitions", [0, -1, 3, 131_072])
def test_partitions_are_a_power_of_two(partitions: int) -> None:
    with pytest.raises(BadInput, match=f"power of two.*{partitions}"):
        check_partitions(partitions)


@pytest.mark.parametrize("namespace", ["", "a b", "{a}", "a:b", "x" * 101])
def test_a_namespace_fits_into_a_key(namespace: str) -> None:
    with pytest.raises(BadInput, match="namespace"):
        check_namespace(namespace)
