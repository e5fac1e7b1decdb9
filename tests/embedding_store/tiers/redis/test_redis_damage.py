"""A record that is not what was written is never trained on: the log restores it, or the error names it."""

from collections.abc import Iterator

import numpy as np
import pytest

from elastable.embedding_store import Commit, MemoryStore, OptimizerSpec, TableSpec, TableUpdate
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import StoreBroken, TakenOver
from elastable.embedding_store.open_store import open_reader, open_store
from elastable.embedding_store.tiers.redis.schema import partition_of, rows_key
from tests.servers import Server

pytestmark = pytest.mark.process

SPEC = TableSpec("users", 100, optimizer=OptimizerSpec.of("adagrad"))  # ten thousand rows of it exceed a MiB
IDS = np.arange(10_000)
BUDGETS = {"whole": "budget=1GiB", "cold": "budget=1MiB"}


def commit_of(version: int, ids: np.ndarray) -> Commit:
    gradients = np.random.default_rng(version).normal(size=(len(ids), SPEC.dim)).astype(np.float32)
    return Commit(version, {"users": TableUpdate(ids, gradients)}, version, {})


def place_of(row_id: int) -> tuple[bytes, bytes]:
    """Key and field of a row's record."""
    partition = int(partition_of(np.array([row_id]), 4)[0])
    return rows_key("elastable", "users", partition), row_id.to_bytes(8, "little")


def damage(server: Server, ids: list[int]) -> None:
    """Flips one bit of the records of some ids: another one of each."""
    with server.client() as client:
        for bit, one in enumerate(ids, 5):
            key, field = place_of(one)
            record = client.hget(key, field)
            assert record is not None
            flipped = int.from_bytes(record, "little") ^ 1 << 50 * bit
            client.hset(key, field, flipped.to_bytes(len(record), "little"))


def rows_of(store: EmbeddingStore) -> bytes:
    return store.lookup({"users": IDS})["users"].tobytes()


@pytest.fixture
def url(redis_url: str) -> str:
    """Of a store whose rows are all written, as of version 1."""
    with open_store(f"{redis_url}?partitions=4") as store:
        store.create_table(SPEC)
        store.commit(commit_of(1, IDS))
    return redis_url


@pytest.fixture
def expected() -> Iterator[EmbeddingStore]:
    with MemoryStore() as store:
        store.create_table(SPEC)
        store.commit(commit_of(1, IDS))
        yield store


@pytest.mark.parametrize("budget", BUDGETS)
def test_damaged_rows_are_named(url: str, redis_node: Server, budget: str) -> None:
    damage(redis_node, [3, 17, 5000])

    def looked_up() -> None:
        with open_store(f"{url}?{BUDGETS[budget]}") as store:
            store.lookup({"users": np.array([5000, 17, 9, 3])})

    named = r"3 records of table 'users' are damaged, those of ids (\d+, )+\d+.*Go back to a checkpoint"
    with pytest.raises(StoreBroken, match=named) as error:
        looked_up()
    assert all(f" {one}" in str(error.value) for one in (3, 17, 5000))
    with open_reader(url) as reader, pytest.raises(StoreBroken, match=r"2 records .* of ids .*17.*partition \d"):
        reader.lookup({"users": np.array([9, 17, 3])})


@pytest.mark.parametrize("budget", BUDGETS)
def test_damaged_rows_that_the_log_holds_are_restored(
    url: str, redis_node: Server, expected: EmbeddingStore, budget: str
) -> None:
    """The writer dies before it writes behind what it committed: the next one finds it in the log."""
    store = open_store(f"{url}?{BUDGETS[budget]}&flush=1000")
    try:
        for one in (store, expected):
            one.commit(commit_of(2, IDS[:100]))
        damage(redis_node, [3, 17])
        with open_store(f"{url}?{BUDGETS[budget]}") as again:
            assert rows_of(again) == rows_of(expected)
            for one in (again, expected):
                one.commit(commit_of(3, IDS[200:300]))  # by which it takes the store over, and writes
        with open_store(url) as last:  # the records are whole again
            assert rows_of(last) == rows_of(expected)
    finally:
        with pytest.raises(TakenOver):
            store.close()


def test_cold_damage_that_a_writer_met_is_refused_at_the_next_opening(url: str, redis_node: Server) -> None:
    """So that a job goes back to its checkpoint, instead of meeting it again and again."""
    damage(redis_node, [17])
    cold = f"{url}?budget=1MiB&flush=1000"
    with open_store(cold) as store:
        store.commit(commit_of(2, IDS[:10]))
        with pytest.raises(StoreBroken, match="those of ids 17 "):
            store.read_rows("users", np.array([9000, 17]))
    with pytest.raises(
        StoreBroken, match="1 records of table 'users' are damaged, those of ids 17, and the log does not"
    ):
        open_store(cold)
    asked = list[StoreBroken]()
    with open_store(cold, on_broken=lambda error, _: asked.append(error)) as store:
        assert "those of ids 17" in str(asked[0])
        assert not store.specs()
