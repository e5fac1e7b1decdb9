"""Slots that move between the nodes of a Cluster are followed, in the middle of a migration too."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import redis

from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.tiers.redis.redis_reader import RedisReader
from elastable.embedding_store.tiers.redis.redis_store import RedisStore
from elastable.embedding_store.tiers.redis.schema import hash_slot
from elastable.embedding_store.tiers.redis.schema_1 import weights_key
from tests.servers import Server

SPEC = TableSpec("t", 4, None, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.1))
IDS = np.arange(500, dtype=np.int64)


def commit_of(version: int) -> Commit:
    gradients = np.random.default_rng(version).normal(size=(len(IDS), 4)).astype(np.float32)
    return Commit(version, {"t": TableUpdate(IDS, gradients)}, version - 1, {})


def rows_of(versions: int) -> np.ndarray:
    with MemoryStore(threads=1) as store:
        store.create_table(SPEC)
        for version in range(1, versions + 1):
            store.commit(commit_of(version))
        return store.lookup({"t": IDS})["t"]


@pytest.fixture
def store(redis_cluster_url: str) -> Iterator[RedisStore]:
    """At version 1."""
    with RedisStore(redis_cluster_url) as store:
        store.create_table(SPEC)
        store.commit(commit_of(1))
        yield store


class Migration:
    """Of the slot of one partition, from its owner to another node, in steps."""

    def __init__(self, servers: list[Server], partition: int) -> None:
        self.slot = hash_slot(weights_key("elastable", "t", partition))
        self.clients = [server.client() for server in servers]
        self.names = [client.execute_command("CLUSTER MYID").decode() for client in self.clients]
        self.ports = [server.port for server in servers]
        ranges = self.clients[0].execute_command("CLUSTER SLOTS")
        (port,) = [int(node[1]) for first, last, node, *_ in _plain(ranges) if first <= self.slot <= last]
        self.source = self.ports.index(port)
        self.target = (self.source + 1) % len(servers)

    def begin(self) -> None:
        self._set_slot(self.target, "IMPORTING", self.names[self.source])
        self._set_slot(self.source, "MIGRATING", self.names[self.target])

    def move(self, key: bytes) -> None:
        answer = self.clients[self.source].execute_command(
            "MIGRATE", "127.0.0.1", self.ports[self.target], key, 0, 5000
        )
        assert answer in (b"OK", b"NOKEY", "OK", "NOKEY", True)

    def keys_left(self) -> list[bytes]:
        return list(self.clients[self.source].execute_command("CLUSTER GETKEYSINSLOT", self.slot, 100))

    def finish(self) -> None:
        for key in self.keys_left():
            self.move(key)
        for node in (self.target, self.source, 3 - self.target - self.source):
            self._set_slot(node, "NODE", self.names[self.target])

    def _set_slot(self, node: int, *words: str) -> None:
        self.clients[node].execute_command("CLUSTER SETSLOT", self.slot, *words)

    def close(self) -> None:
        for client in self.clients:
            client.close()


def _plain(ranges: object) -> list[tuple]:
    """CLUSTER SLOTS as a list, whichever way this redis-py shapes it."""
    if isinstance(ranges, dict):
        return [(first, last, node["primary"]) for (first, last), node in ranges.items()]
    return list(ranges)  # type: ignore[call-overload]


@pytest.fixture
def migration(redis_cluster_nodes: list[Server]) -> Iterator[Migration]:
    migration = Migration(redis_cluster_nodes, partition=11)
    yield migration
    migration.finish()
    migration.close()


def test_the_tables_lie_on_every_node(store: RedisStore, redis_cluster_nodes: list[Server]) -> None:
    assert store.row_count("t") == 500
    for server in redis_cluster_nodes:
        with server.client() as client:
            assert client.dbsize() > 20


def test_a_moved_slot(store: RedisStore, migration: Migration, redis_cluster_url: str) -> None:
    with RedisReader(redis_cluster_url) as reader:
        np.testing.assert_array_equal(reader.lookup({"t": IDS}, version=1)["t"], rows_of(1))
        migration.begin()
        migration.finish()
        np.testing.assert_array_equal(reader.lookup({"t": IDS}, version=1)["t"], rows_of(1))
    store.commit(commit_of(2))
    np.testing.assert_array_equal(store.lookup({"t": IDS}, version=2)["t"], rows_of(2))


@pytest.mark.parametrize("moved", ["nothing", "everything"])
def test_a_slot_on_its_way(store: RedisStore, migration: Migration, moved: str) -> None:
    migration.begin()
    for key in migration.keys_left() if moved == "everything" else ():
        migration.move(key)
    np.testing.assert_array_equal(store.lookup({"t": IDS}, version=1)["t"], rows_of(1))
    assert store.row_count("t") == 500
    store.commit(commit_of(2))
    np.testing.assert_array_equal(store.lookup({"t": IDS}, version=2)["t"], rows_of(2))
    migration.finish()
    store.commit(commit_of(3))
    np.testing.assert_array_equal(store.lookup({"t": IDS}, version=3)["t"], rows_of(3))


def test_a_partition_torn_between_two_nodes(store: RedisStore, migration: Migration) -> None:
    migration.begin()
    migration.move(weights_key("elastable", "t", 11))
    np.testing.assert_array_equal(store.lookup({"t": IDS}, version=1)["t"], rows_of(1))
    with pytest.raises(StoreFailed, match=r"TRYAGAIN"):
        store.commit(commit_of(2))
    finishing = threading.Timer(0.1, migration.finish)
    finishing.start()
    store.commit(commit_of(2))
    finishing.join(10)
    np.testing.assert_array_equal(store.lookup({"t": IDS}, version=2)["t"], rows_of(2))


def test_the_version_moves_too(store: RedisStore, redis_cluster_nodes: list[Server]) -> None:
    migration = Migration(redis_cluster_nodes, 0)
    migration.slot = hash_slot(b"{elastable}:version")
    owners = [n for n, c in enumerate(migration.clients) if migration.slot in _slots_of(c, migration.ports[n])]
    migration.source, migration.target = owners[0], (owners[0] + 1) % 3
    migration.begin()
    for key in migration.keys_left():
        migration.move(key)
    store.lookup({"t": IDS}, version=1)
    store.commit(commit_of(2))
    migration.finish()
    store.lookup({"t": IDS}, version=2)
    migration.close()


def test_pins_while_the_registry_moves(store: RedisStore, redis_cluster_nodes: list[Server]) -> None:
    migration = Migration(redis_cluster_nodes, 0)
    migration.slot = hash_slot(b"{elastable}:version")
    owners = [n for n, c in enumerate(migration.clients) if migration.slot in _slots_of(c, migration.ports[n])]
    migration.source, migration.target = owners[0], (owners[0] + 1) % 3
    pin = store.pin()
    migration.begin()
    for key in migration.keys_left():
        migration.move(key)
    store.commit(commit_of(2))
    finishing = threading.Timer(0.1, migration.finish)
    finishing.start()
    pin.renew()  # it waits until the slot has arrived
    finishing.join(10)
    with store.pin() as second:
        assert [told.version for told in store.pins()] == [1, 2]
        store.recover()
        store.commit(commit_of(3))
        np.testing.assert_array_equal(pin.lookup({"t": IDS})["t"], rows_of(1))
        np.testing.assert_array_equal(second.lookup({"t": IDS})["t"], rows_of(2))
    pin.close()
    migration.close()


def _slots_of(client: redis.Redis, port: int) -> set[int]:
    ranges = _plain(client.execute_command("CLUSTER SLOTS"))
    return {slot for first, last, node, *_ in ranges if int(node[1]) == port for slot in range(first, last + 1)}
