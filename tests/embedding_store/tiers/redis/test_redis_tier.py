"""Records in Redis: what the tier's contract leaves to it."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import redis

from elastable.embedding_store.contract.tier import Records, TierTable
from elastable.embedding_store.errors import StoreBroken, TakenOver, Unsupported
from elastable.embedding_store.tiers.redis import record_transfer as record_scan
from elastable.embedding_store.tiers.redis.connection import Deadline
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from elastable.embedding_store.tiers.redis.reply_shapes import Command
from elastable.embedding_store.tiers.redis.schema import partition_of, rows_key
from elastable.embedding_store.tiers.redis.topology import Topology
from tests.embedding_store.tiers.redis.tier_samples import IDS, TABLE, changed, read_back, rows_of


def call(tier: RedisTier, *command: str | bytes) -> None:
    tier._place.topology.call([(b"{elastable}", command)], tier._place.deadline())


@pytest.fixture
def tier(node_or_cluster_url: str) -> Iterator[RedisTier]:
    with RedisTier(f"{node_or_cluster_url}?partitions=16") as tier:
        tier.create(TABLE)
        yield tier


def test_the_loss_of_one_of_two_writes_of_the_same_entry_is_noticed(redis_url: str) -> None:
    """As when one node of a Cluster loses the tail of its append-only file, and the others do not."""
    with RedisTier(f"{redis_url}?partitions=1") as tier, redis.Redis.from_url(redis_url) as client:
        tier.create(TABLE)
        tier.write(changed(7, IDS[:200]), {}, 7)
        older = client.dump("{elastable:t:0}:rows")
        tier.write(changed(7, IDS[200:]), {}, 7)
        tier.put_state(b"state")
        assert tier.sequence == 7
        client.restore("{elastable:t:0}:rows", 0, older, replace=True)
        with RedisTier(redis_url) as later, pytest.raises(StoreBroken, match="has lost data of partition 0 of table"):
            later.tables()
        with pytest.raises(StoreBroken, match="has lost data of partition 0 of table"):
            read_back(tier)


@pytest.mark.parametrize(("width", "most_bytes"), [(None, 1 << 30), (0, 1 << 10), (5, 1 << 10)])
def test_scans_in_pieces(tier: RedisTier, width: int | None, most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastable.embedding_store.tiers.redis.record_transfer._PIECE_BYTES", most_bytes)
    tier.write(changed(6), {}, 6)
    blocks = list(tier.scan("t", 150, width))
    assert [len(block.ids) for block in blocks] == [150, 150, 100]
    ids, found = (np.concatenate([getattr(block, kind) for block in blocks]) for kind in ("ids", "rows"))
    order = np.argsort(ids)
    np.testing.assert_array_equal(ids[order], IDS)
    np.testing.assert_array_equal(found[order], rows_of(6)[:, :width])
    assert all((block.positions == -1).all() and block.table == "t" for block in blocks)


def test_a_scan_while_hashes_grow_and_shrink_gives_each_id_once(tier: RedisTier) -> None:
    """Hashes of 2,000 ids are still being rehashed when the scan begins."""
    ids = np.arange(32_000, dtype=np.int64)
    tier.write([Records("t", ids, ids, np.zeros((len(ids), 16), np.uint8))], {}, 1)
    tier.write([], {"t": (ids[500:], ids[500:])}, 2)
    found = np.concatenate([block.ids for block in tier.scan("t")])
    np.testing.assert_array_equal(np.sort(found), ids[:500])


def test_what_hscan_shows_twice_is_given_once(tier: RedisTier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier.write(changed(12), {}, 12)
    monkeypatch.setattr(record_scan, "_PIECE_BYTES", 1)
    topology = type(tier._place.topology)
    call = topology.call

    def twice(self: Topology, commands: Sequence[tuple[bytes, Command]], deadline: Deadline) -> list[object]:
        replies = zip(commands, call(self, commands, deadline), strict=True)
        return [[reply[0], reply[1] * 2] if words[0] == "HSCAN" else reply for (_, words), reply in replies]

    monkeypatch.setattr(topology, "call", twice)
    found = {int(one): bytes(row) for block in tier.scan("t") for one, row in zip(block.ids, block.rows, strict=True)}
    assert sum(len(block.ids) for block in tier.scan("t", width=0)) == len(IDS)
    assert found == {int(one): row.tobytes() for one, row in zip(IDS, rows_of(12), strict=True)}


def test_a_reader_meets_a_table_that_was_made_anew(tier: RedisTier, node_or_cluster_url: str) -> None:
    tier.write(changed(1), {}, 5)
    tier.put_state(b"")
    with RedisTier(node_or_cluster_url) as reader:
        read_back(reader)
        tier.drop("t")
        tier.create(TABLE)
        tier.write(changed(6, IDS[:3]), {}, 6)
        np.testing.assert_array_equal(read_back(reader, IDS[:3]), rows_of(6, IDS[:3]))
        assert sum(len(block.ids) for block in reader.scan("t")) == 3


def test_damage_goes_with_its_table(tier: RedisTier, node_or_cluster_url: str) -> None:
    tier.write(changed(1), {}, 1)
    key = rows_key("elastable", "t", int(partition_of(IDS[3:4], 16)[0]))
    tier._place.topology.call([(key, ("HSET", key, IDS[3].tobytes(), bytes(24)))], tier._place.deadline())
    with pytest.raises(StoreBroken, match="those of ids 3 "):
        read_back(tier)
    for anew in (False, True):
        if anew:
            tier.drop("t")
            tier.create(TABLE)
        tier.put_state(b"")
        with RedisTier(node_or_cluster_url) as later:
            assert set(later.tables()) == {"t"}
            assert later.doubtful("t").tolist() == ([] if anew else [3])


def test_a_state_is_checked(tier: RedisTier) -> None:
    tier.put_state(b"first")
    call(tier, "HSET", "{elastable}:tier:state", "state", b"x")
    with pytest.raises(StoreBroken, match="corrupt"):
        tier.state()


def test_opening_and_reading_take_nothing_over(tier: RedisTier, node_or_cluster_url: str) -> None:
    tier.write(changed(1), {}, 5)
    with RedisTier(node_or_cluster_url) as reader:
        read_back(reader)
        list(reader.scan("t"))
        assert reader.sequence == 5
        assert reader.state() is None
        assert reader.other_writer() is not None
        tier.write(changed(2), {}, 6)
        tier.put_state(b"")
        reader.write(changed(3), {}, 7)
    for refused in (
        lambda: tier.write(changed(4), {}, 8),
        lambda: tier.put_state(b""),
        lambda: tier.drop("t"),
        lambda: tier.create(TierTable("u", 1)),
        tier.require_owner,
    ):
        with pytest.raises(TakenOver, match="was taken over"):
            refused()
    np.testing.assert_array_equal(read_back(tier), rows_of(3))


@pytest.mark.parametrize("schema", [2, 4])
def test_a_registry_of_another_schema_is_refused(tier: RedisTier, schema: int) -> None:
    call(tier, "HSET", "{elastable}:tier:tables", "u", f'{{"schema": {schema}}}')
    with pytest.raises(Unsupported, match=f"has key schema {schema}, this release reads 3"):
        tier.tables()
    call(tier, "HSET", "{elastable}:tier:tables", "u", '{"schema": 3, "partitions": 5}')
    with pytest.raises(StoreBroken, match="the registry of tables holds"):
        tier.tables()
