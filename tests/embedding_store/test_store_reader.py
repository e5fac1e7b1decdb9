"""Readers of a store in Redis: flushed rows with their lag, or exactly the newest version."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import numpy as np
import pytest
import redis

from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import (
    AdmissionSpec,
    EvictionSpec,
    InitializerSpec,
    OptimizerSpec,
    TableSpec,
)
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.engine.store_tier import StoreTier
from elastable.embedding_store.errors import (
    FutureVersion,
    IdOutOfRange,
    StaleVersion,
    StoreBroken,
    TableNotFound,
    Unsupported,
)
from elastable.embedding_store.store_reader import StoreReader
from elastable.embedding_store.tiers.redis.redis_log import RedisLog
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from tests.contracts.store_samples import create_tables
from tests.threads import on_threads

_OF = OptimizerSpec.of
SPECS = [
    TableSpec("adagrad", 3, 60, optimizer=_OF("adagrad", learning_rate=0.1), seed=4),
    TableSpec("half", 5, None, "float16", InitializerSpec("normal", 0.0, 0.1), 3, _OF("adam", learning_rate=0.05)),
    TableSpec("brain", 4, None, "bfloat16", InitializerSpec("normal", 0.0, 1.0), 3, _OF("sgd", learning_rate=0.1)),
    TableSpec("served", 4, None, "int8", InitializerSpec("uniform", -1.0, 1.0), 5),
    TableSpec("evicts", 2, None, optimizer=_OF("adagrad"), eviction=EvictionSpec(max_rows=20, every=2)),
    TableSpec("admits", 2, None, optimizer=_OF("sgd", learning_rate=0.1), admission=AdmissionSpec(2, 64)),
    TableSpec("follows", 3, None, optimizer=_OF("adamw", lazy=False, learning_rate=0.1, weight_decay=0.05)),
]
FOLLOWING = "follows"
IDS = np.arange(60, dtype=np.int64)


class Written:
    """A store in Redis, and everything that is open on it."""

    def __init__(self, url: str, every_s: float = 3600.0) -> None:
        self.url, self._place = url, RedisPlace(url)
        self.store = MemoryStore(threads=1)
        self.store.keep_tier(StoreTier(RedisTier(self._place), RedisLog(self._place), 1 << 20), every_s=every_s)
        create_tables(self.store, *SPECS)

    def close(self) -> None:
        try:
            self.store.close()
        finally:
            self._place.close()


def updates(version: int, specs: list[TableSpec] = SPECS) -> dict[str, TableUpdate]:
    random = np.random.default_rng(version)
    made = {}
    for spec in specs:
        if spec.dtype != "int8":
            ids = random.permutation(IDS)[:12]
            made[spec.name] = TableUpdate(ids, random.normal(size=(12, spec.dim)).astype(np.float32))
    return made


def commit(store: EmbeddingStore, specs: list[TableSpec] = SPECS) -> None:
    version = store.version() + 1
    store.commit(Commit(version, updates(version, specs), version - 1, {}, record=b"%d" % version))


def rows(source: StoreReader | EmbeddingStore, tables: list[str], version: int | None = None) -> dict[str, bytes]:
    repeated = np.concatenate((IDS, IDS[:7]))
    found = source.lookup(dict.fromkeys(tables, repeated), version)
    return {name: values.tobytes() for name, values in found.items()}


@contextmanager
def reading(url: str, follow: bool = False) -> Iterator[StoreReader]:
    place = RedisPlace(url)
    try:
        with StoreReader(RedisTier(place), RedisLog(place), follow) as reader:
            yield reader
    finally:
        place.close()


@pytest.fixture(params=["redis_url", "redis_cluster_url"])
def url(request: pytest.FixtureRequest) -> str:
    return f"{request.getfixturevalue(request.param)}?partitions=4"


@pytest.fixture
def written(url: str) -> Iterator[Written]:
    made = Written(url)
    yield made
    made.close()


STEADY = [spec.name for spec in SPECS if spec.name != FOLLOWING]
ALL = [spec.name for spec in SPECS]


def test_flushed_rows_have_a_version_and_a_lag(written: Written) -> None:
    store = written.store
    with reading(written.url) as reader:
        assert reader.specs() == {}
        commit(store)
        store.flush()
        assert set(reader.specs()) == set(ALL)
        at_flush = rows(store, STEADY)
        assert rows(reader, STEADY) == at_flush
        assert (reader.status().version, reader.status().newest, reader.status().lag) == (1, 1, 0)
        for _ in range(3):
            commit(store)
        assert rows(reader, STEADY) == at_flush
        assert rows(store, STEADY) != at_flush
        status = reader.status()
        assert (status.version, status.newest, status.lag, reader.version()) == (1, 4, 3, 1)
        store.flush()
        assert rows(reader, STEADY) == rows(store, STEADY)
        assert reader.status().lag == 0
        with pytest.raises(Unsupported, match=r"table 'follows': its rows follow every step.*follow=True"):
            rows(reader, [FOLLOWING])
        with pytest.raises(Unsupported, match=r"version 4 of redis.*of no single version.*follow=True"):
            rows(reader, STEADY, 4)


def changes(store: EmbeddingStore) -> Iterator[Callable[[], object]]:
    """Everything that can happen to a table, step by step."""
    weights = np.random.default_rng(1).normal(size=(9, 4)).astype(np.float32)
    other = TableSpec("brain", 6, None, optimizer=_OF("sgd", learning_rate=0.2), seed=9)
    yield lambda: commit(store)
    yield lambda: store.put("served", [RowBlock(IDS[:9], weights, np.empty((9, 0), np.float32))])
    yield from [lambda: commit(store)] * 4
    yield lambda: store.delete("half", IDS[10:30])
    yield lambda: store.put("half", [store.read_rows("half", IDS[30:40])])
    yield lambda: commit(store)
    yield lambda: store.clear("adagrad")
    yield lambda: commit(store)
    yield lambda: store.drop_table("brain")
    yield lambda: commit(store, [spec for spec in SPECS if spec.name != "brain"])
    yield lambda: store.create_table(other)
    yield from [lambda: commit(store, list(store.specs().values()))] * 3
    yield lambda: store.reset_version(40)
    yield lambda: commit(store, list(store.specs().values()))


FLUSHED: dict[str, Callable[[int], bool]] = {
    "never": lambda step: False,
    "sometimes": lambda step: step % 3 == 2,
    "always": lambda step: True,
}


@pytest.mark.parametrize("flushed", FLUSHED)
def test_followers_read_exactly_the_newest_version(written: Written, flushed: str) -> None:
    store = written.store
    with reading(written.url, follow=True) as reader:
        for step, change in enumerate(changes(store)):
            change()
            if FLUSHED[flushed](step):
                store.flush()
            there = list(store.specs())
            assert reader.version() == store.version(), step
            assert rows(reader, there, store.version()) == rows(store, there), step
            with reading(written.url, follow=True) as late:  # which begins from what there is now
                assert rows(late, there, store.version()) == rows(store, there), step
        with pytest.raises(StaleVersion, match="read version 41 now"):
            rows(reader, ["half"], 40)
        with pytest.raises(FutureVersion, match="read version 41 now"):
            rows(reader, ["half"], 42)
        with pytest.raises(TableNotFound, match="no table 'nothing'"):
            rows(reader, ["nothing"])
        with pytest.raises(IdOutOfRange, match="60"):
            reader.lookup({"adagrad": np.array([60])})


def test_followers_are_exact_while_rows_are_flushed_at_any_moment(url: str) -> None:
    expected: dict[int, dict[str, bytes]] = {}
    with create_tables(MemoryStore(threads=1), *SPECS) as plain:
        for version in range(1, 31):
            commit(plain)
            expected[version] = rows(plain, ALL)
    written, done = Written(url, every_s=0.001), threading.Event()

    def write() -> None:
        for version in range(1, 31):
            commit(written.store)
            if version % 4 == 0:
                written.store.flush()
        done.set()

    def follow() -> None:
        while not done.is_set():
            version = reader.version()
            with suppress(StaleVersion):
                assert not version or rows(reader, ALL, version) == expected[version]

    with closing(written), reading(url, follow=True) as reader:
        on_threads([write, follow], done)
        assert rows(reader, ALL, 30) == expected[30]


def test_readers_take_nothing_over_and_need_no_right_to_write(redis_url: str) -> None:
    written = Written(redis_url)
    commit(written.store)
    written.store.flush()
    commit(written.store)
    with redis.Redis.from_url(redis_url) as client:
        rights = ("~{elastable*", "+@read", "+@connection", "+info", "+cluster|slots", "+time")
        client.execute_command("ACL", "SETUSER", "onlooker", "on", ">secret", *rights)
        owner = client.get("{elastable}:owner")
        for follow, tables in ((False, STEADY), (True, ALL)):
            with reading(redis_url.replace("://", "://onlooker:secret@"), follow) as reader:
                assert (rows(reader, tables) == rows(written.store, tables)) == follow
        assert client.get("{elastable}:owner") == owner
        commit(written.store)
        client.acl_deluser("onlooker")
    written.close()


def test_lost_rows_and_lost_changes_are_errors(redis_url: str) -> None:
    written = Written(redis_url)
    commit(written.store)
    written.store.flush()
    with redis.Redis.from_url(redis_url) as client, reading(redis_url) as flushed, reading(redis_url, True) as follows:
        rows(flushed, ["half"])
        for key in client.scan_iter("{elastable:half:*"):
            client.delete(key)
        for reader in (flushed, follows):
            with pytest.raises(StoreBroken, match=r"table 'half'"):
                rows(reader, ["half"])
        with pytest.raises(StoreBroken, match=r"table 'half'"), reading(redis_url):
            pass
        client.delete("{elastable}:log")
        with pytest.raises(StoreBroken, match="the end of the log is lost"):
            rows(follows, ["adagrad"])
    written.close()
