"""Readers of a store in Redis: flushed rows with their lag, or exactly the newest version."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest
import redis

from elastable.embedding_store import EmbeddingStore, MemoryStore
from elastable.embedding_store.contract.tier import Records
from elastable.embedding_store.engine.store_tier import StoreTier
from elastable.embedding_store.errors import (
    FutureVersion,
    IdOutOfRange,
    StaleVersion,
    StoreBroken,
    TableNotFound,
    Unsupported,
)
from elastable.embedding_store.store_reader import HeldReader, StoreReader
from elastable.embedding_store.tiers.redis.redis_log import RedisLog
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from tests.contracts.store_history import MOST, NAMES, SPECS, TRAINED, History, Random, commit_of, ids_of, program
from tests.contracts.store_samples import create_tables
from tests.threads import on_threads

STEADY = [name for name in NAMES if SPECS[name].optimizer.lazy]
NUMBERS = np.array([*range(MOST + 1), *range(5)])


class Written:
    """A store in Redis, and everything that is open on it."""

    def __init__(self, url: str, every_s: float = 3600.0) -> None:
        self.url, self._place = url, RedisPlace(url)
        self.store = MemoryStore(threads=1)
        self.store.keep_tier(StoreTier(RedisTier(self._place), RedisLog(self._place), 1 << 20), every_s=every_s)
        create_tables(self.store, *SPECS.values())

    def close(self) -> None:
        try:
            self.store.close()
        finally:
            self._place.close()


def commit(store: EmbeddingStore) -> None:
    version = store.version() + 1
    numbers = np.random.default_rng(version).permutation(MOST + 1)[:9].tolist()
    store.commit(replace(commit_of(version, numbers, version, TRAINED), record=b"%d" % version))


def rows(source: StoreReader | EmbeddingStore, tables: Sequence[str], version: int | None = None) -> dict[str, bytes]:
    found = source.lookup({name: ids_of(name, NUMBERS) for name in tables}, version)
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


def test_flushed_rows_have_a_version_and_a_lag(written: Written) -> None:
    store = written.store
    with reading(written.url) as reader:
        assert reader.specs() == {}
        commit(store)
        store.flush()
        assert set(reader.specs()) == set(NAMES)
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
        with pytest.raises(Unsupported, match=r"table 'every': its rows follow every step.*follow=True"):
            rows(reader, ["every"])
        with pytest.raises(Unsupported, match=r"version 4 of redis.*of no single version.*follow=True"):
            rows(reader, STEADY, 4)


class Followed(History):
    """A follower, and one that begins from what there is, read exactly the newest version after each call."""

    calls = (*History.calls, "flush", "flush_and_clear")

    def __init__(self, written: Written, reader: StoreReader) -> None:
        self.written, self.reader = written, reader
        super().__init__(written.store, made=True)

    def flush(self, random: Random) -> None:
        self.written.store.flush()

    def flush_and_clear(self, random: Random) -> None:
        """What lies in the tier counts no more."""
        self.flush(random)
        for _ in range(3):
            self.clear(random)

    def close(self) -> None:
        self.release()
        self.plain.close()

    def settle(self) -> None:
        version = self.store.version()
        assert self.reader.version() == version
        expected = rows(self.store, self.names)
        assert rows(self.reader, self.names, version) == expected
        with reading(self.written.url, follow=True) as late:
            assert rows(late, self.names, version) == expected


def test_followers_read_exactly_the_newest_version(written: Written) -> None:
    with reading(written.url, follow=True) as reader:
        Followed(written, reader).play(program(Followed, 0))
        written.store.reset_version(40)
        with pytest.raises(StaleVersion, match="read version 40 now"):
            rows(reader, ["half"], 39)
        with pytest.raises(FutureVersion, match="read version 40 now"):
            rows(reader, ["half"], 41)
        with pytest.raises(TableNotFound, match="no table 'nothing'"):
            reader.lookup({"nothing": np.arange(3)})
        with pytest.raises(IdOutOfRange, match="14"):
            reader.lookup({"fixed": np.array([14])})


def test_rows_are_read_while_each_part_of_them_is_flushed(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading all of them takes longer than a flush: what the log loses meanwhile was read from it before."""
    store, scan = written.store, RedisTier.scan

    def slowly(tier: RedisTier, table: str) -> Iterator[Records]:
        for block in scan(tier, table, 2):
            store.flush()
            commit(store)
            yield block

    commit(store)
    store.flush()
    commit(store)
    monkeypatch.setattr(RedisTier, "scan", slowly)
    place = RedisPlace(written.url)
    with closing(place), HeldReader(RedisTier(place), RedisLog(place), timeout_s=0) as reader:
        assert store.version() > 9
        assert (reader.version(), rows(reader, NAMES)) == (store.version(), rows(store, NAMES))


def test_followers_are_exact_while_rows_are_flushed_at_any_moment(url: str) -> None:
    expected: dict[int, dict[str, bytes]] = {}
    with create_tables(MemoryStore(threads=1), *SPECS.values()) as plain:
        for version in range(1, 31):
            commit(plain)
            expected[version] = rows(plain, NAMES)
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
                assert not version or rows(reader, NAMES, version) == expected[version]

    with closing(written), reading(url, follow=True) as reader:
        on_threads([write, follow], done)
        assert rows(reader, NAMES, 30) == expected[30]


def test_readers_take_nothing_over_and_need_no_right_to_write(redis_url: str) -> None:
    written = Written(redis_url)
    commit(written.store)
    written.store.flush()
    commit(written.store)
    with redis.Redis.from_url(redis_url) as client:
        rights = ("~{elastable*", "+@read", "+@connection", "+info", "+cluster|slots", "+time")
        client.execute_command("ACL", "SETUSER", "onlooker", "on", ">secret", *rights)
        owner = client.get("{elastable}:owner")
        for follow, tables in ((False, STEADY), (True, NAMES)):
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
            rows(follows, ["dynamic"])
    written.close()
