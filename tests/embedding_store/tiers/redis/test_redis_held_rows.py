"""Rows that a writer remembers from its commits: never others than those that lie in the server, and not read again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import redis

from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.errors import BadInput, StoreFailed
from elastable.embedding_store.tiers.redis.held_rows import HeldRows
from elastable.embedding_store.tiers.redis.redis_store import RedisStore
from elastable.embedding_store.tiers.redis.schema import partition_of
from elastable.embedding_store.tiers.redis.schema_1 import STAMP_FIELD, weights_key
from elastable.embedding_store.tiers.redis.url import RedisUrl
from tests.embedding_store.disturbed_job import IDS, SPECS, commit_of, everything, prepared, undisturbed
from tests.embedding_store.dying_writer import Died, dying_after

pytestmark = pytest.mark.process

NOTHING_HELD, A_FEW_ROWS = "held_bytes=0", "held_bytes=4KiB"
HALF = TableSpec("half", 8, None, optimizer=OptimizerSpec.of("adam", learning_rate=0.1), dtype="bfloat16")


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def bytes_told(client: redis.Redis) -> int:
    return int(client.info("stats")["total_net_output_bytes"])


def told_by_a_commit(client: redis.Redis, store: RedisStore, version: int) -> int:
    before = bytes_told(client)
    store.commit(commit_of(version))
    return bytes_told(client) - before


def test_what_a_commit_wrote_the_next_one_does_not_read(redis_url: str, client: redis.Redis) -> None:
    told = {}
    for held in ("", NOTHING_HELD):
        client.flushall()
        with prepared(f"{redis_url}?partitions=4&{held}") as store:
            for version in range(2, 5):
                store.commit(commit_of(version))
            told[held] = told_by_a_commit(client, store, 5)
    rows = 100 * sum(4 * spec.dim for spec in SPECS.values())  # weights alone; slots come on top
    assert told[NOTHING_HELD] - told[""] > rows


@pytest.mark.parametrize("held", ["", A_FEW_ROWS])
def test_the_numbers_are_those_of_reading(redis_url: str, client: redis.Redis, held: str) -> None:
    with undisturbed(1) as right, prepared(f"{redis_url}?partitions=4&{held}") as store:
        for version in range(2, 10):
            commit = commit_of(version, ("adam",) if version == 5 else tuple(SPECS))
            store.commit(commit)
            right.commit(commit)
        assert everything(store) == everything(right)


def test_rows_of_other_dtypes_are_held_as_they_lie_there(redis_url: str, client: redis.Redis) -> None:
    found = []
    for held in ("", NOTHING_HELD):
        client.flushall()
        with RedisStore(f"{redis_url}?partitions=4&{held}") as store:
            store.create_table(HALF)
            random = np.random.default_rng(3)
            for version in range(1, 8):
                ids = random.choice(60, 30, replace=False)
                store.commit(Commit(version, {"half": TableUpdate(ids, random.standard_normal((30, 8), np.float32))},
                                    version - 1, {}))  # fmt: skip
            block = store.read_rows("half", np.arange(60))
            found.append((block.ids.tobytes(), block.weights.tobytes(), block.slots.tobytes()))
    assert found[0] == found[1]


def changed_outside(store: RedisStore) -> None:
    """Rows of every table put, others deleted."""
    for name, spec in SPECS.items():
        width = store.read_rows(name, IDS[:1]).slots.shape[1]
        ids = IDS[::7]
        store.put(name, [RowBlock(ids, np.full((len(ids), spec.dim), 0.5, np.float32),
                                  np.full((len(ids), width), 0.25, np.float32))])  # fmt: skip
        store.delete(name, IDS[::5])


@pytest.mark.parametrize("pinned", [False, True])
def test_rows_put_and_deleted_outside_commits_are_seen(redis_url: str, client: redis.Redis, pinned: bool) -> None:
    found = []
    for held in ("", NOTHING_HELD):
        client.flushall()
        with prepared(f"{redis_url}?partitions=4&{held}") as store:
            store.commit(commit_of(2))
            pin = store.pin(lease_s=600) if pinned else None
            before = store.lookup(dict.fromkeys(SPECS, IDS), 2)
            changed_outside(store)
            for version in range(3, 6):
                store.commit(commit_of(version))
            if pin is not None:
                then = pin.lookup(dict.fromkeys(SPECS, IDS))
                assert all(then[name].tobytes() == rows.tobytes() for name, rows in before.items())
                pin.close()
            found.append(everything(store))
    assert found[0] == found[1]


def test_a_table_made_anew_begins_anew(redis_url: str) -> None:
    with prepared(redis_url) as store, undisturbed(1) as right:
        for place in (store, right):
            place.drop_table("adam")
            place.create_table(TableSpec("adam", 6, None, optimizer=OptimizerSpec.of("sgd", learning_rate=0.5)))
            for version in range(2, 5):
                place.commit(commit_of(version))
            place.clear("adagrad")
            place.commit(commit_of(5))
        assert everything(store) == everything(right)


def test_a_table_made_anew_with_more_partitions_begins_anew(redis_url: str) -> None:
    with undisturbed(1) as right, prepared(f"{redis_url}?partitions=4") as store:
        right.clear("adam")
        store.drop_table("adam")
        with RedisStore(f"{redis_url}?partitions=16") as other:
            other.create_table(SPECS["adam"])
        store.forget()
        store.recover()
        for place in (store, right):
            for version in range(2, 5):
                place.commit(commit_of(version))
        assert everything(store) == everything(right)


def test_what_another_master_wrote_meanwhile_is_read(redis_url: str) -> None:
    with undisturbed(6) as right, prepared(redis_url) as first, RedisStore(redis_url) as second:
        first.commit(commit_of(2))
        second.recover()
        second.commit(commit_of(3))
        with pytest.raises(StoreFailed, match="was taken over"):
            first.commit(commit_of(4))
        first.recover()
        for version in range(4, 7):
            first.commit(commit_of(version))
        assert everything(first) == everything(right)


@pytest.mark.parametrize("writes", range(1, 14, 3))
def test_a_commit_that_broke_off_leaves_nothing_held(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    with undisturbed(5) as right, prepared(f"{redis_url}?partitions=2") as store:
        store.commit(commit_of(2))
        with dying_after(monkeypatch, writes) as sent:
            try:
                store.commit(commit_of(3))
            except Died:
                assert sent.count == writes
        store.recover()
        for version in range(store.version() + 1, 6):
            store.commit(commit_of(version))
        assert everything(store) == everything(right)


def test_a_commit_that_is_staged_and_dropped_changes_nothing_held(redis_url: str) -> None:
    with undisturbed(4) as right, prepared(redis_url) as store:
        store.commit(commit_of(2))
        store.stage(commit_of(3, ("adam",)))  # and never finished
        store.stage(commit_of(3))()
        store.commit(commit_of(4))
        assert everything(store) == everything(right)


def test_a_partition_that_went_back_is_read_again(redis_url: str, client: redis.Redis) -> None:
    """A node restarted from an older copy of its own: what it has now is what counts, as without held rows."""
    spec, ids = TableSpec("t", 2, 100, optimizer=OptimizerSpec.of("sgd", learning_rate=1.0)), np.arange(100)
    key = weights_key("elastable", "t", int(partition_of(ids[:1], 2)[0]))
    with RedisStore(f"{redis_url}?partitions=2") as store:
        store.create_table(spec)
        copies = []
        for version in range(1, 4):
            copies.append(client.dump(key))
            store.commit(Commit(version, {"t": TableUpdate(ids, np.ones((100, 2), np.float32))}, version - 1, {}))
        client.restore(key, 0, copies[2], replace=True)  # type: ignore[arg-type]
        assert client.hget(key, STAMP_FIELD) == (2).to_bytes(8, "little")
        old = store.lookup({"t": ids[:1]})["t"]
        store.commit(Commit(4, {"t": TableUpdate(ids, np.ones((100, 2), np.float32))}, 3, {}))
        np.testing.assert_array_equal(store.lookup({"t": ids[:1]})["t"], old - 1)


def test_no_more_is_held_than_allowed(redis_url: str) -> None:
    held = HeldRows(4096)
    assert held.count == 0
    with prepared(f"{redis_url}?{A_FEW_ROWS}") as store:
        counts = []
        for version in range(2, 8):
            store.commit(commit_of(version))
            counts.append(store._commits._held.count)
        rows = sum(table.rows.array.nbytes for table in store._commits._held._tables.values())
        assert 0 < max(counts) < 300
        assert rows <= 4096 + 3 * 16 * 72  # two sets of eight rows are the least
    with prepared(f"{redis_url}?namespace=other&{NOTHING_HELD}") as store:
        assert store._commits._held.count == 0


def test_memory_is_taken_as_it_is_needed_and_given_back(redis_url: str, client: redis.Redis) -> None:
    wide = TableSpec("wide", 64, None, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.1))
    ids = np.random.default_rng(5).integers(-(1 << 62), 1 << 62, 40_000)
    gradients = np.ones((len(ids), 64), np.float32)
    row_bytes = 2 * 4 * 64

    def taken(store: RedisStore) -> int:
        return sum(table.rows.array.nbytes for table in store._commits._held._tables.values())

    def commit(store: RedisStore, version: int, count: int) -> int:
        before = bytes_told(client)
        store.commit(Commit(version, {"wide": TableUpdate(ids[:count], gradients[:count])}, version - 1, {}))
        return bytes_told(client) - before

    with RedisStore(redis_url) as store:
        store.create_table(wide)
        for version in range(1, 20):
            commit(store, version, 500)
        assert 500 * row_bytes < taken(store) <= 4 << 20
        assert commit(store, 20, 500) < 500 * row_bytes / 10
        for version in range(21, 25):
            commit(store, version, len(ids))
        assert len(ids) * row_bytes < taken(store) <= 256 << 20
        assert commit(store, 25, len(ids)) < len(ids) * row_bytes / 10
    assert taken(store) == 0


def test_how_much_is_held_is_told_by_the_url() -> None:
    assert RedisUrl.parse("redis://h").held_bytes == 256 << 20
    assert RedisUrl.parse("redis://h?held_bytes=2GiB").held_bytes == 2 << 30
    sizes = [RedisUrl.parse(f"redis://h?held_bytes={size}").held_bytes for size in (0, "1KiB", "1MiB")]
    assert all(small < large for small, large in pairwise(sizes))
    with pytest.raises(BadInput, match="size 'many'"):
        RedisUrl.parse("redis://h?held_bytes=many")
