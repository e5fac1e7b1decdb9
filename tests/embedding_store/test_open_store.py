"""Stores and sources by URL."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store.composite import PartitionedStore, storage_of_url
from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine import MemoryStore
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.open_reader import open_reader
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.support.store_url import shard_urls


def test_memory() -> None:
    with open_store("memory", threads=1) as store:
        assert isinstance(store, MemoryStore)


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


def test_memory_is_no_source_of_its_own() -> None:
    with pytest.raises(BadInput, match="rows of memory are in the process that has it open"):
        open_reader("memory")


def test_partitioned_stores(redis_url: str) -> None:
    ids = np.arange(7)
    with open_store("encoding:memory,memory,memory") as store:
        assert isinstance(store, PartitionedStore)
        store.create_table(TableSpec("t", 4))
        assert (store.shards, store.lookup({"t": ids})["t"].shape) == (3, (7, 4))
    shards = ",".join(f"{redis_url}?namespace=shard/{number}&partitions=4" for number in range(2))
    with open_store(f"token:{shards}") as store:
        store.create_table(TableSpec("t", 4))
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
    ("url", "told"),
    [
        ("file://tmp/x", "three slashes"),
        ("file:///", "three slashes"),
        ("file:///x?budget=2GB", "size '2GB'"),
        ("file:///x?budget=10", "at least 1MiB"),
        (
            "file:///x?budgets=1",
            "option 'budgets' is unknown; known options are budget, .*; did you mean budget",
        ),
        ("redis://me:secret?a@h:1", "percent-encode"),
        ("redis://me:secret@h:1?fsync=always", "fsync=always: the server decides"),
    ],
)
def test_urls_of_tiers_that_cannot_be(url: str, told: str) -> None:
    with pytest.raises(BadInput, match=told) as refused:
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


@pytest.mark.parametrize("fsync", ["always", "never"])
def test_the_server_decides_how_durable_a_log_in_redis_is(redis_url: str, fsync: str) -> None:
    with pytest.raises(BadInput, match=rf"fsync={fsync}: the server decides how durable a log in Redis is"):
        open_store(f"{redis_url}?fsync={fsync}")
