"""A writer of a tier that was taken for dead, and wakes up, changes nothing any more; nor does what it had sent."""

import contextlib
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import redis

from elastable.embedding_store.errors import StoreFailed, TakenOver, Unavailable
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from tests.embedding_store.tiers.redis.tier_samples import IDS, TABLE, changed, read_back, rows_of
from tests.servers import Server
from tests.waiting import until, until_stopped

pytestmark = pytest.mark.process

_DEADLINE_S = 60.0


def test_a_writer_that_wakes_up(any_server_url: str) -> None:
    """It is stopped after a third of its write, another process takes over and writes on, and it goes on."""
    url = f"{any_server_url}?partitions=32"
    with RedisTier(url) as tier:
        tier.create(TABLE)
        command = [sys.executable, "-m", "tests.embedding_store.tiers.redis.stopped_tier_writer", url, "10"]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        ) as old:
            try:
                until_stopped(old)
                with RedisTier(url) as another:
                    found = read_back(another)
                    new = (found == rows_of(2)).all(axis=1)
                    assert 0 < new.sum() < len(IDS)  # it was stopped in the middle
                    assert another.other_writer() == f"{os.uname().nodename}:{old.pid}"
                    assert another.sequence == 2
                    another.take_over()
                    another.write(changed(3), {}, 3)
                    another.put_state(b"three")
                    old.send_signal(signal.SIGCONT)
                    output, _ = old.communicate(timeout=_DEADLINE_S)
                    assert old.returncode == 0, output
                    np.testing.assert_array_equal(read_back(another), rows_of(3))
                    assert another.state() == b"three"
                    assert another.sequence == 3
                    assert set(another.tables()) == {"t"}
                    another.write(changed(4), {}, 4)
            finally:
                if old.poll() is None:
                    old.kill()
    ended = {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in output.splitlines()}
    assert ended.pop("read") == "done"
    assert set(ended) == {"write", "again", "delete", "state", "create", "drop", "owner"}
    for what, how in ended.items():
        assert how.startswith("TakenOver "), (what, how)
        assert f"was taken over, its owner is now process {os.getpid()} on " in how, what


def test_what_a_broken_connection_left_at_the_server_is_not_done_later(redis_node: Server, redis_url: str) -> None:
    """The server is stopped while a write waits in its sockets; the writer gives up, and writes newer rows."""
    with RedisTier(f"{redis_url}?partitions=4&deadline=3") as tier:
        tier.create(TABLE)
        tier.write(changed(1), {}, 1)
        assert redis_node.process is not None
        redis_node.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(Unavailable):
                tier.write(changed(2), {}, 2)
        finally:
            redis_node.process.send_signal(signal.SIGCONT)
        with redis_node.client() as client:
            before = lists_of_clients(client)
            tier.write(changed(3), {}, 3)
            assert lists_of_clients(client) == before + 1  # the connection that broke was looked for, and ended
            tier.write(changed(4), {}, 4)
            assert lists_of_clients(client) == before + 1
            # One that the writer tried in the meantime may have sent its name and no more: the server reads its end.
            until(lambda: len([line for line in client.client_list() if line["name"]]) == 1, 60)
        np.testing.assert_array_equal(read_back(tier), rows_of(4))


def lists_of_clients(client: redis.Redis) -> int:
    """How many times the server was asked who is connected."""
    return int(client.info("commandstats").get("cmdstat_client|list", {"calls": 0})["calls"])


def test_readers_and_other_namespaces_are_left_alone(redis_url: str) -> None:
    elsewhere = [f"{redis_url}?namespace=other", f"{redis_url}/3", f"{redis_url}?namespace=elastable/2"]
    with RedisTier(redis_url) as tier, RedisTier(redis_url) as reader:
        tier.create(TABLE)
        others = [RedisTier(url) for url in elsewhere]
        for other in others:
            other.create(TABLE)
        reader.tables()
        with redis.Redis.from_url(redis_url) as client:
            before = {line["id"] for line in client.client_list()}
            ours = {line["id"] for line in client.client_list() if line["name"].startswith("elastable:0:elastable:")}
            tier.take_over()
            after = {line["id"] for line in client.client_list()}
        assert ours
        assert before - after == ours
        for other in others:
            other.write(changed(2), {}, 2)
            other.close()


def test_a_server_that_forbids_to_end_connections(
    redis_node: Server, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """State and tables are fenced by Redis itself all the same; rows once a connection is made anew."""
    with redis_node.client() as client:
        client.execute_command("ACL", "SETUSER", "meek", "on", ">secret", "~*", "+@all", "-client|kill", "-client|list")
        meek = redis_url.replace("://", "://meek:secret@")
        try:
            with RedisTier(redis_url) as old, RedisTier(meek) as successor:
                old.create(TABLE)
                old.write(changed(1), {}, 1)
                successor.write(changed(2), {}, 2)
                assert "does not let this user end the connections of other writers (NOPERM" in caplog.text
                with pytest.raises(TakenOver, match="was taken over"):
                    old.put_state(b"")
                with pytest.raises(TakenOver, match="was taken over"):
                    old.drop("t")
        finally:
            client.execute_command("ACL", "DELUSER", "meek")


def test_one_that_is_taken_over_while_it_takes_over(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first connection was admitted, and is closed by another process before it is used."""
    with RedisTier(redis_url) as first, RedisTier(redis_url) as second:
        require = RedisPlace.require
        others = iter([second.take_over])

        def overtaken(place: RedisPlace, owner: bytes | None) -> None:
            next(others, lambda: None)()
            require(place, owner)

        monkeypatch.setattr(RedisPlace, "require", overtaken)
        with pytest.raises(TakenOver, match="was taken over"):
            first.take_over()
        second.create(TABLE)
        second.write(changed(2), {}, 2)


def test_some_that_take_over_at_once(redis_url: str) -> None:
    with RedisTier(redis_url) as tier:
        tier.create(TABLE)
        tier.write(changed(2), {}, 2)

    def run(tier: RedisTier) -> None:
        with contextlib.suppress(StoreFailed, Unavailable):  # another one took over later
            tier.take_over()
            tier.write(changed(3), {}, 3)
            tier.put_state(b"three")

    with contextlib.ExitStack() as closing, ThreadPoolExecutor(4) as threads:
        tiers = [closing.enter_context(RedisTier(redis_url)) for _ in range(4)]
        for ended in [threads.submit(run, tier) for tier in tiers]:
            ended.result(_DEADLINE_S)
        with RedisTier(redis_url) as last:
            last.take_over()
            last.write(changed(3), {}, 3)
            np.testing.assert_array_equal(read_back(last), rows_of(3))
            assert set(last.tables()) == {"t"}
