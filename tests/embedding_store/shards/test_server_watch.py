"""What a master knows of its store servers: what they hold, which one does not answer, and which one it waits for."""

import threading
from pathlib import Path

import pytest

from elastable.embedding_store import TableSpec
from elastable.embedding_store.composite.store_servers import ServerWatch
from elastable.embedding_store.measures import BOUNDS_S, Histogram
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.shards.server_contract import ShardStatus
from elastable.embedding_store.shards.shard import Shard
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.messages.plain_data import to_message
from elastable.embedding_store.wire.pushes.push_messages import shard_status_from_message
from tests.contracts.store_samples import create_tables
from tests.embedding_store.shards.served_shards import served
from tests.embedding_store.shards.test_store_servers import begin, commit, push_all
from tests.waiting import until

LIMIT_S = 120.0


def test_each_server_says_what_it_holds_and_one_that_is_away_keeps_what_it_said() -> None:
    with served(2) as (servers, store):
        assert [status.shard for status in store.watch.statuses()] == [None, None]
        begin(store)
        push_all(store, 0)
        store.watch.look()
        pushed = [status.shard for status in store.watch.statuses()]
        assert [it.pushed_bytes for it in pushed if it] == [it.shard.buffered_bytes for it in servers]
        store.commit_pushed(commit(0))
        store.watch.look()
        found = store.watch.statuses()
        assert [status.address for status in found] == [server.address for server in servers]
        assert [status.shard.version for status in found if status.shard] == [1, 1]
        rows = [status.shard.rows for status in found if status.shard]
        assert min(rows) > 0
        assert sum(rows) == sum(store.table_statistics(name).rows for name in store.specs())
        assert store.shard_status().rows == sum(rows)
        assert all(status.failure == "" and status.waited_s == 0 for status in found)

        servers[1].stop()
        store.watch.look()
        there, away = store.watch.statuses()
        assert there == found[0]
        assert servers[1].address in away.failure
        assert away.shard == found[1].shard
        servers[1].start()


def test_the_server_that_a_version_waits_for_is_named() -> None:
    with served(2) as (servers, store):
        begin(store)
        push_all(store, 0)
        assert servers[1].shard._committing.acquire(timeout=LIMIT_S)
        try:
            committing = threading.Thread(target=store.commit_pushed, args=(commit(0),))
            committing.start()

            def second_is_waited_for() -> bool:  # the first server has answered
                first, second = (status.waited_s for status in store.watch.statuses())
                return servers[0].store.version() == 1 and first == 0 and second > 0

            until(second_is_waited_for)
        finally:
            servers[1].shard._committing.release()
        committing.join(LIMIT_S)
        assert [status.waited_s for status in store.watch.statuses()] == [0, 0]


def test_a_status_of_a_store_with_a_tier_has_its_lag_and_hit_rate(tmp_path: Path) -> None:
    with create_tables(open_store(f"file://{tmp_path}/rows"), TableSpec("t", dim=2, vocabulary_size=10)) as store:
        found = Shard(store, 1 << 20).status()
        assert (found.pushed_bytes, found.rows, found.failure, found.hit_rate) == (0, 0, "", None)
    assert ShardStatus(wanted_rows=10, read_rows=4).hit_rate == pytest.approx(0.6)


def test_a_message_says_all_of_a_status_and_no_number_is_below_zero() -> None:
    took = Histogram((1, 2, *[0] * len(BOUNDS_S[1:])), 0.25)
    status = ShardStatus(1, 2, 3, 4, 5, 6, 7, 8, "disk full", "file:///rows", {"append": took})
    assert shard_status_from_message(to_message(store_pb2.ShardStatus, status)) == status
    message = store_pb2.ShardStatus(rows=-5, failure="\x1b[31m" + "x" * 9_000, store="a\nb" * 9_000)
    hostile = shard_status_from_message(message)
    assert hostile.rows == 0
    assert "\x1b" not in hostile.failure
    assert len(hostile.failure) < 1_100
    assert len(hostile.store) < 2_100
    assert "\n" not in hostile.store


def test_phases_of_commits_that_cannot_be_are_left_out() -> None:
    buckets = [1] * (len(BOUNDS_S) + 1)
    phase = store_pb2.CommitPhase
    phases = [
        phase(phase="prepare", counts=buckets, seconds=1.0),
        phase(phase="\x1b[31m", counts=buckets, seconds=1.0),
        phase(phase="apply", counts=buckets[1:], seconds=1.0),
        phase(phase="apply", counts=[-1, *buckets[1:]], seconds=1.0),
        phase(phase="append", counts=buckets, seconds=float("inf")),
        phase(phase="append", counts=buckets, seconds=-1.0),
        phase(phase="append"),
    ]
    found = shard_status_from_message(store_pb2.ShardStatus(commits=phases))
    assert dict(found.commits) == {"prepare": Histogram(tuple(buckets), 1.0)}


def test_a_look_asks_each_server_once_whatever_a_call_waits_for() -> None:
    now = [10.0]
    with served(1) as (_, store):
        watch = ServerWatch(store._servers, lambda: now[0])

        def waits() -> float:
            now[0] = 12.5
            return watch.statuses()[0].waited_s

        assert watch.timed(0, waits)() == 2.5
        assert watch.statuses()[0].waited_s == 0
