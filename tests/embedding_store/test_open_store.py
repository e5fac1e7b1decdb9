"""Stores and sources by URL."""

from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store import Commit, PartitionedStore, TableSpec, TableUpdate
from elastable.embedding_store.composite.locations import storage_of_url
from elastable.embedding_store.errors import BadInput, Unsupported
from elastable.embedding_store.open_store import open_reader, open_store
from elastable.embedding_store.support.store_url import outlives_process, shard_urls
from tests.contracts.store_samples import create_tables

IDS = np.array([3, 9, 3], np.int64)


def commit(version: int) -> Commit:
    return Commit(version, {"t": TableUpdate(IDS[:2], np.ones((2, 4), np.float32))}, version - 1, {})


@pytest.mark.parametrize("url", ["", "disk", "http://me:secret@h:1", "rediss//h", "memory://"])
def test_unknown_schemes(url: str) -> None:
    with pytest.raises(
        BadInput,
        match=r"memory, memory\?log=/folder, file:///folder, grpc://host:port, .*redis://host:port, rediss://host:port",
    ) as refused:
        open_store(url)
    assert "secret" not in str(refused.value)
    with pytest.raises(BadInput, match="redis://host:port, rediss://host:port"):
        open_reader(url)


@pytest.mark.parametrize("url", ["file:///somewhere", "memory", "memory?log=/somewhere"])
def test_stores_of_one_process_are_not_read_by_others(url: str) -> None:
    with pytest.raises(BadInput, match=r"rows of (memory|file:///somewhere) are in the process that has it open"):
        open_reader(url)


def test_partitioned_stores(redis_url: str) -> None:
    ids = np.arange(7)
    with open_store("encoding:memory,memory,memory") as store:
        assert isinstance(store, PartitionedStore)
        store.create_table(TableSpec("t", 4))
        assert (store.shards, store.lookup({"t": ids})["t"].shape) == (3, (7, 4))
    shards = ",".join(f"{redis_url}?namespace=shard/{number}&partitions=4" for number in range(2))
    with create_tables(open_store(f"token:{shards}"), TableSpec("t", 4)) as store:
        store.commit(Commit(1, {"t": TableUpdate(ids, np.ones((7, 4), np.float32))}, 0, {}))
        before = store.lookup({"t": ids})["t"]
    with open_store(f"token:{shards}") as store:
        assert store.version() == 1
        np.testing.assert_array_equal(store.lookup({"t": ids})["t"], before)


def test_commas_between_hosts_divide_noshard_urls() -> None:
    urls = "redis://a:1,b:2/0,redis://me:secret@[::1]:3,memory:4?namespace=x,memory,grpc://c:5"
    assert shard_urls(f"token:{urls}") == (
        "token",
        ["redis://a:1,b:2/0", "redis://me:secret@[::1]:3,memory:4?namespace=x", "memory", "grpc://c:5"],
    )
    assert shard_urls("redis://token:1") == ("", [])


def test_shards_by_url_that_cannot_be() -> None:
    with pytest.raises(BadInput, match="cannot be partitioned by URL"):
        open_store("token:encoding:memory,memory")
    with pytest.raises(BadInput, match="store 'disk' is unknown"):
        open_store("token:disk,memory")
    with pytest.raises(BadInput, match="store '' is unknown"):
        open_store("token:")


def test_files(tmp_path: Path) -> None:
    with open_store(f"file://{tmp_path}/a%20b?budget=2MiB", threads=1) as store:
        store.create_table(TableSpec("t", 4))
    with open_store(f"file://{tmp_path}/a%20b") as store:
        assert set(store.specs()) == {"t"}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file://tmp/x", "three slashes"),
        ("file:///", "three slashes"),
        ("file:///x?budget=2GB", "size '2GB'"),
        ("file:///x?budget=10", "at least 1MiB"),
        ("file:///x?budgets=1", "option 'budgets' is unknown; known options are budget, .*; did you mean budget"),
        ("redis://me:secret?a@h:1", "percent-encode"),
        ("redis://me:secret@h:1?fsync=always", "fsync=always: the server decides"),
    ],
)
def test_urls_of_tiers_that_cannot_be(url: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as refused:
        open_store(url)
    assert "secret" not in str(refused.value)


def test_where_shards_keep_rows() -> None:
    assert storage_of_url("token:redis://a:1,b:2,rediss://c") == "redis"
    assert storage_of_url("token:redis://a:1,file:///b") == "memory"
    assert storage_of_url("encoding:file:///a,file:///b") == "file"


def test_shards_are_closed_where_one_of_them_fails(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="unknown"):
        open_store(f"token:file://{tmp_path}/one,disk://two")
    with open_store(f"token:file://{tmp_path}/one,memory") as store:  # nobody has the folder
        assert isinstance(store, PartitionedStore)


# Readers


def test_shards_are_read_but_not_followed(redis_url: str, valkey_url: str) -> None:
    url = f"token:{redis_url},{valkey_url}"
    with open_store(url) as store, open_reader(url) as reader:
        assert reader.specs() == {}
        store.create_table(TableSpec("t", 4))
        for shard in shard_urls(url)[1]:
            with open_reader(shard, follow=True) as follows:
                assert set(follows.specs()) == {"t"}
    with pytest.raises(Unsupported, match="follow=True of a store that is split"):
        open_reader(url, follow=True)


def test_a_store_without_a_log_in_redis_is_read_and_not_followed(redis_url: str) -> None:
    url = f"{redis_url}?log=none"
    with create_tables(open_store(url), TableSpec("t", 4)) as store:
        store.commit(commit(1))
        rows = store.lookup({"t": IDS})["t"]
    with open_reader(url) as reader:
        np.testing.assert_array_equal(reader.lookup({"t": IDS})["t"], rows)
    with pytest.raises(Unsupported, match="whose log is not in Redis"):
        open_reader(url, follow=True)


@pytest.mark.parametrize(
    ("url", "lasts"),
    [
        ("memory", False), ("memory?log=/a", True), ("file:///a", True), ("grpc://a:1", False),
        ("redis://a:1", True), ("rediss+sentinel://a:1/0?service=m", True),
        ("token:redis://a:1,redis://b:1", True), ("token:redis://a:1,memory", False),
    ],
)  # fmt: skip
def test_which_stores_outlive_their_process(url: str, lasts: bool) -> None:
    assert outlives_process(url) == lasts
