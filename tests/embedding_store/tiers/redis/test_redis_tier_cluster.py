"""Slots that move between the nodes of a Cluster are followed by the tier, in the middle of a migration too."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from redis.crc import key_slot

from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from elastable.embedding_store.tiers.redis.schema import rows_key, tier_state_key
from tests.embedding_store.tiers.redis.tier_samples import IDS, begin, changed, read_back, rows_of
from tests.servers import Server

GONE = IDS[:50]


class Migration:
    """Of one slot; the steps are those of `redis-cli --cluster reshard`."""

    def __init__(self, servers: list[Server], slot: int) -> None:
        self.slot = slot
        self.clients = [server.client() for server in servers]
        self.names = [client.execute_command("CLUSTER MYID").decode() for client in self.clients]
        self.ports = [server.port for server in servers]
        ranges = self.clients[0].execute_command("CLUSTER SLOTS")
        (port,) = [int(node[1]) for first, last, node, *_ in _plain(ranges) if first <= slot <= last]
        self.source = self.ports.index(port)
        self.target = (self.source + 1) % len(servers)

    def begin(self) -> None:
        """From now on the source answers ASK for keys that it does not have."""
        self._set_slot(self.target, "IMPORTING", self.names[self.source])
        self._set_slot(self.source, "MIGRATING", self.names[self.target])

    def move(self, key: bytes) -> None:
        migrate = ("MIGRATE", "127.0.0.1", self.ports[self.target], key, 0, 5000)
        answer = self.clients[self.source].execute_command(*migrate)
        assert answer in (b"OK", b"NOKEY", "OK", "NOKEY", True)

    def keys_left(self) -> list[bytes]:
        return list(self.clients[self.source].execute_command("CLUSTER GETKEYSINSLOT", self.slot, 100))

    def finish(self) -> None:
        """Moves the rest; the target owns the slot. Finishing twice is harmless."""
        for key in self.keys_left():
            self.move(key)
        for node in (self.target, self.source, 3 - self.target - self.source):
            self._set_slot(node, "NODE", self.names[self.target])

    def close(self) -> None:
        for client in self.clients:
            client.close()

    def _set_slot(self, node: int, *words: str) -> None:
        self.clients[node].execute_command("CLUSTER SETSLOT", self.slot, *words)


def _plain(ranges: object) -> list[tuple]:
    """CLUSTER SLOTS as a list, whichever way this redis-py shapes it."""
    if isinstance(ranges, dict):
        return [(first, last, node["primary"]) for (first, last), node in ranges.items()]
    return list(ranges)  # type: ignore[call-overload]


@pytest.fixture
def tier(redis_cluster_url: str) -> Iterator[RedisTier]:
    with RedisTier(redis_cluster_url) as tier:
        begin(tier)
        yield tier


@pytest.fixture
def migration(redis_cluster_nodes: list[Server]) -> Iterator[Migration]:
    migration = Migration(redis_cluster_nodes, key_slot(rows_key("elastable", "t", 11)))
    yield migration
    migration.finish()
    migration.close()


def write_and_delete(tier: RedisTier, sequence: int) -> None:
    """Deletes some rows, and writes them and all others anew."""
    tier.write([], {"t": (GONE, GONE)}, sequence)
    tier.write(changed(sequence), {"t": (GONE, GONE)}, sequence)


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
    migration = Migration(redis_cluster_nodes, key_slot(tier_state_key("elastable")))
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
    migration = Migration(redis_cluster_nodes, key_slot(tier_state_key("elastable")))
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
