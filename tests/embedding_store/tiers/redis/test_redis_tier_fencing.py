"""A writer of a tier that was taken for dead, and wakes up, changes nothing any more; nor does what it had sent."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import redis

from elastable.embedding_store.contract.tier import TierTable
from elastable.embedding_store.errors import ElastableError, StoreFailed, TakenOver, Unavailable
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from elastable.embedding_store.tiers.redis.reply_shapes import Command
from tests.embedding_store.dying_writer import dying_after, started
from tests.embedding_store.tiers.redis.tier_samples import IDS, TABLE, begin, changed, read_back, rows_of
from tests.servers import Server
from tests.waiting import until, until_stopped

pytestmark = pytest.mark.process

_DEADLINE_S = 60.0


def test_a_writer_that_wakes_up(any_server_url: str) -> None:
    """It is stopped after a third of its write, another process takes over and writes on, and it goes on."""
    url = f"{any_server_url}?partitions=32"
    with RedisTier(url) as tier:
        tier.create(TABLE)
        with started("tiers.redis.test_redis_tier_fencing", url, "10") as old:
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
                output, complaints = old.communicate(timeout=_DEADLINE_S)
                assert old.returncode == 0, complaints
                np.testing.assert_array_equal(read_back(another), rows_of(3))
                assert another.state() == b"three"
                assert another.sequence == 3
                assert set(another.tables()) == {"t"}
                another.write(changed(4), {}, 4)
    ended = {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in output.splitlines()}
    assert ended.pop("read") == "done"
    assert set(ended) == {"write", "again", "delete", "state", "create", "drop", "owner"}
    for what, how in ended.items():
        assert how.startswith("TakenOver "), (what, how)
        assert f"was taken over, its owner is now process {os.getpid()} on " in how, what


def test_what_a_broken_connection_left_at_the_server_is_not_done_later(redis_node: Server, redis_url: str) -> None:
    """The server is stopped while a write waits in its sockets; the writer gives up, and writes newer rows."""
    with RedisTier(f"{redis_url}?partitions=4&deadline=3") as tier:
        begin(tier)
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


def test_a_server_that_ends_no_connection(redis_url: str, meek_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """State and tables are fenced by Redis itself all the same; rows once a connection is made anew."""
    with RedisTier(redis_url) as old, RedisTier(meek_url) as successor:
        begin(old)
        successor.write(changed(2), {}, 2)
        assert "does not let this user end the connections of other writers (NOPERM" in caplog.text
        for act in (lambda: old.put_state(b""), lambda: old.drop("t")):
            with pytest.raises(TakenOver, match="was taken over"):
                act()


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


KEY = b"{elastable}:something"


def set_to(value: int) -> list[Command]:
    return [("SET", KEY, value)]


def test_a_change_of_a_superseded_writer_is_refused(node_or_cluster_url: str) -> None:
    first, second = RedisPlace(node_or_cluster_url), RedisPlace(node_or_cluster_url)
    first.change([], lambda answers: set_to(1), first.deadline())
    second.take_over()
    first._admit = lambda connection, deadline: None  # type: ignore[method-assign]  # as if it had read before
    with pytest.raises(TakenOver, match="was taken over, its owner is now process"):
        first.change([], lambda answers: set_to(2), first.deadline())
    with pytest.raises(TakenOver):
        first.require_owner()
    second.require_owner()
    first.close()
    second.close()


def test_a_writer_that_is_superseded_between_question_and_change(redis_url: str) -> None:
    first, second = RedisPlace(redis_url), RedisPlace(redis_url)
    first.take_over()

    def overtaken(answers: list[object]) -> list[Command]:
        second.owner = "other:1:x"
        second.topology.call([(KEY, ("SET", "{elastable}:owner", "other:1:x:0"))], second.deadline())
        return set_to(3)

    with pytest.raises(TakenOver):
        first.change([], overtaken, first.deadline())
    assert second.topology.call([(KEY, ("GET", KEY))], second.deadline()) == [None]
    first.close()
    second.close()
    with pytest.raises(StoreFailed, match="is closed"):
        first.change([], lambda answers: set_to(4), first.deadline())


def main(url: str, commands: int) -> None:
    """Stops in the write of sequence 2."""
    with RedisTier(url) as tier:
        tier.write(changed(1), {}, 1)

        def stopped() -> None:
            with dying_after(pytest.MonkeyPatch(), commands, lambda: os.kill(os.getpid(), signal.SIGSTOP)):
                tier.write(changed(2), {"t": (IDS[:0], IDS[:0])}, 2)

        tell("write", stopped)
        tell("again", lambda: tier.write(changed(2), {}, 2))
        tell("delete", lambda: tier.write([], {"t": (IDS, IDS)}, 3))
        tell("state", lambda: tier.put_state(b"of the one that was stopped"))
        tell("create", lambda: tier.create(TierTable("u", 1)))
        tell("drop", lambda: tier.drop("t"))
        tell("owner", tier.require_owner)
        tell("read", lambda: read_back(tier))


def tell(what: str, act: Callable[[], object]) -> None:
    try:
        act()
        print(what, "done", flush=True)
    except ElastableError as error:
        print(what, type(error).__name__, error, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
