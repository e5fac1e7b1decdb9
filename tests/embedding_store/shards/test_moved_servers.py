"""Store servers that come back at another address, and are found there by those who call them."""

from pathlib import Path

import pytest

from elastable.embedding_store.errors import Unavailable
from elastable.embedding_store.wire.pushes.shard_client import ShardClient
from tests.embedding_store.shards.served_shards import ServedShard, served
from tests.embedding_store.shards.test_store_servers import assert_same_rows, begin, commit, push_all


def test_commits_and_looks_go_where_a_server_is_by_now(tmp_path: Path) -> None:
    with served(2, tmp_path) as (servers, store):
        before = servers[1].address
        store.follow(lambda number: servers[number].address)
        begin(store)
        push_all(store, 0)
        store.commit_pushed(commit(0))
        servers[1].move()
        store.watch.look()  # does not reach it, and hears where it is
        store.watch.look()
        assert [(each.address, each.failure) for each in store.watch.statuses()] == [
            (server.address, "") for server in servers
        ]
        assert store.address == ",".join(server.address for server in servers) != before
        assert store.commit_pushed(commit(1)).missing  # its owner claims it again
        push_all(store, 1)
        store.commit_pushed(commit(1))
        assert_same_rows(store, 2)
        servers[0].move()  # and without a look
        assert store.commit_pushed(commit(2)).missing
        push_all(store, 2)
        store.commit_pushed(commit(2))
        assert_same_rows(store, 3)


def test_a_server_that_nobody_knows_of_is_tried_where_it_was(tmp_path: Path) -> None:
    server = ServedShard(f"memory?log={tmp_path}")
    asked: list[str] = []

    def find() -> str | None:
        asked.append(client.address)
        if len(asked) == 1:
            raise Unavailable("the registry is away")
        if len(asked) == 3:
            server.start()
        return None

    with ShardClient(server.address, 60.0) as client:
        client.follow(find)
        server.stop()
        assert client.version() == 0
        assert asked[:3] == [server.address] * 3
    server.stop()


def test_one_whom_nobody_follows_stays_where_it_was(tmp_path: Path) -> None:
    server = ServedShard(f"memory?log={tmp_path}")
    with ShardClient(server.address, 0.5) as client:
        assert client.version() == 0
        server.move()
        with pytest.raises(Unavailable):
            client.version()
    server.stop()
