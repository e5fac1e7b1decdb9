"""A commit that breaks off half way can be repeated, and then nobody sees that it ever did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import redis

from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.errors import BadIds, StaleVersion, StoreFailed
from elastable.embedding_store.tiers.redis.redis_store import RedisStore
from elastable.embedding_store.tiers.redis.schema import partition_of
from tests.cutting_proxy import CuttingProxy, cutting_proxy
from tests.embedding_store.disturbed_job import IDS, SPECS, commit_of, everything, prepared, undisturbed
from tests.servers import Server


def stamps(server: Server) -> list[int]:
    with server.client() as client:
        keys = list(client.scan_iter("*:weights"))
        return [int.from_bytes(client.hget(key, "version"), "little") for key in keys]


@pytest.fixture
def proxy(durable: Server) -> Iterator[CuttingProxy]:
    with cutting_proxy(durable.port) as proxy:
        yield proxy


@pytest.mark.parametrize("transactions", [1, 40, 130])
@pytest.mark.parametrize("ending", ["cut", "kill"])
def test_a_commit_that_broke_off_is_repeated(
    durable: Server, proxy: CuttingProxy, transactions: int, ending: str
) -> None:
    url = f"redis://127.0.0.1:{proxy.port}"
    with prepared(url) as store:
        proxy.when_cut = durable.kill if ending == "kill" else proxy.when_cut
        proxy.transactions = transactions
        with pytest.raises(StoreFailed, match=r"commit of version 2 broke off.*repeat the same commit"):
            store.commit(commit_of(2))
        if ending == "kill":
            durable.start()
        assert stamps(durable).count(2) == transactions
        assert store.version() == 1
        with pytest.raises(StaleVersion, match="version 2 is being committed"):
            store.lookup(dict.fromkeys(SPECS, IDS), version=1)
        store.commit(commit_of(2))
        assert store.version() == 2
        store.commit(commit_of(3))
        assert everything(store) == everything(undisturbed(3))


def test_another_process_repeats_a_commit(durable: Server, proxy: CuttingProxy) -> None:
    with prepared(f"redis://127.0.0.1:{proxy.port}") as store:
        proxy.transactions = 30
        with pytest.raises(StoreFailed, match="broke off"):
            store.commit(commit_of(2))
    with RedisStore(durable.url) as other:
        other.commit(commit_of(2))
        assert everything(other) == everything(undisturbed(2))


def test_only_the_last_answer_was_lost(durable: Server, proxy: CuttingProxy) -> None:
    with prepared(f"redis://127.0.0.1:{proxy.port}") as store:
        changed = sum(len(set(partition_of(update.ids, 64).tolist())) for update in commit_of(2).updates.values())
        proxy.transactions, proxy.when_cut = changed + 1, durable.kill
        with pytest.raises(StoreFailed, match="broke off"):
            store.commit(replace(commit_of(2), record=b"two"))
        durable.start()
        assert store.version() == 2
        store.commit(replace(commit_of(2), record=b"two"))
        with pytest.raises(StaleVersion):
            store.commit(commit_of(2))
        assert everything(store) == everything(undisturbed(2))
        assert store.record() == b"two"
        store.commit(commit_of(3))
        assert (everything(store), store.record()) == (everything(undisturbed(3)), None)


def test_another_commit_takes_the_place_of_one_that_broke_off(durable: Server, proxy: CuttingProxy) -> None:
    with prepared(f"redis://127.0.0.1:{proxy.port}") as store:
        proxy.transactions = 40
        with pytest.raises(StoreFailed, match="broke off"):
            store.commit(replace(commit_of(7), version=2))
        store.commit(commit_of(2))
        assert everything(store) == everything(undisturbed(2))


def test_a_full_server(fleeting: Server) -> None:
    with prepared(fleeting.url) as store, fleeting.client() as client:
        client.config_set("maxmemory", "1")
        with pytest.raises(StoreFailed, match="OOM"):
            store.commit(commit_of(2))
        client.config_set("maxmemory", "0")
        store.commit(commit_of(2))
        assert everything(store) == everything(undisturbed(2))


def test_a_partition_of_a_later_version(redis_url: str) -> None:
    with prepared(redis_url) as store, redis.Redis.from_url(redis_url) as client:
        client.set("{elastable}:version", 0)
        client.hset(
            f"{{elastable:sgd:{int(partition_of(IDS[:1], 64)[0])}}}:weights", "version", (9).to_bytes(8, "little")
        )
        with pytest.raises(StoreFailed, match="bears version 9"):
            store.commit(Commit(1, {"sgd": TableUpdate(IDS[:1], np.ones((1, 5), np.float32))}, 0, {}))


def test_an_id_twice_in_a_commit(redis_url: str) -> None:
    with prepared(redis_url) as store:
        update = TableUpdate(np.array([4, 8, 4]), np.ones((3, 5), np.float32))
        with pytest.raises(BadIds, match="'sgd': id 4 stands at positions 0 and 2"):
            store.commit(Commit(2, {"sgd": update}, 1, {}))
