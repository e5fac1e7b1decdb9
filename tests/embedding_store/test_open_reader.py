"""Readers by URL."""

from __future__ import annotations

import numpy as np
import pytest

from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import BadInput, Unsupported
from elastable.embedding_store.open_reader import open_reader
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.store_reader import StoreReader
from elastable.embedding_store.support.store_url import outlives_process, shard_urls

IDS = np.array([3, 9, 3], np.int64)


def commit(version: int) -> Commit:
    return Commit(version, {"t": TableUpdate(IDS[:2], np.ones((2, 4), np.float32))}, version - 1, {})


def test_a_store_in_redis(redis_url: str) -> None:
    url = f"{redis_url}?namespace=read&partitions=4&flush=3600"
    with open_store(url) as store:
        store.create_table(TableSpec("t", 4))
        store.commit(commit(1))
    with open_store(url) as store, open_reader(url) as flushed, open_reader(url, follow=True) as follows:
        assert isinstance(flushed, StoreReader)
        before = store.lookup({"t": IDS})["t"]
        store.commit(commit(2))
        np.testing.assert_array_equal(flushed.lookup({"t": IDS})["t"], before)
        np.testing.assert_array_equal(follows.lookup({"t": IDS}, 2)["t"], store.lookup({"t": IDS})["t"])
        assert (flushed.version(), flushed.status().lag, follows.version()) == (1, 1, 2)
    with open_reader(url) as later:  # what was closed is flushed
        assert later.version() == 2


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
    with open_store(url) as store:
        store.create_table(TableSpec("t", 4))
        store.commit(commit(1))
        rows = store.lookup({"t": IDS})["t"]
    with open_reader(url) as reader:
        np.testing.assert_array_equal(reader.lookup({"t": IDS})["t"], rows)
    with pytest.raises(Unsupported, match="whose log is not in Redis"):
        open_reader(url, follow=True)


@pytest.mark.parametrize("url", ["file:///somewhere", "memory", "memory?log=/somewhere"])
def test_stores_of_one_process_are_not_read_by_others(url: str) -> None:
    with pytest.raises(BadInput, match="are in the process that has it open"):
        open_reader(url)


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
