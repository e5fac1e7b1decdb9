"""A writer that was taken for dead, and wakes up, changes nothing any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import redis

from elastable.embedding_store.errors import StaleVersion, StoreFailed
from elastable.embedding_store.tiers.redis.redis_reader import RedisReader
from elastable.embedding_store.tiers.redis.redis_store import RedisStore
from tests.embedding_store.disturbed_job import IDS, SPECS, commit_of, everything, prepared, undisturbed
from tests.servers import Server

pytestmark = pytest.mark.process

_PATIENCE_S = 60.0


def wait_until_stopped(process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end and process.poll() is None:
        if Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return
        time.sleep(0.01)
    raise AssertionError(process.communicate(timeout=_PATIENCE_S))


@pytest.mark.parametrize("server", ["redis_url", "valkey_url", "redis_cluster_url"])
def test_a_writer_that_wakes_up(server: str, request: pytest.FixtureRequest) -> None:
    url = f"{request.getfixturevalue(server)}?partitions=8"
    with RedisStore(url) as successor:
        for spec in SPECS.values():
            successor.create_table(spec)
        command = [sys.executable, "-m", "tests.embedding_store.tiers.redis.stopped_writer", url, "10"]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        ) as old:
            try:
                wait_until_stopped(old)
                with RedisStore(url) as another:
                    assert another.version() == 1
                    assert another.recover() > 0
                    assert everything(another) == everything(undisturbed(1))
                    another.commit(commit_of(2))
                    another.commit(commit_of(3))
                    old.send_signal(signal.SIGCONT)
                    told, _ = old.communicate(timeout=_PATIENCE_S)
                    assert old.returncode == 0
                    assert everything(another) == everything(undisturbed(3))
                    assert another.version() == 3
                    another.commit(commit_of(4))
                    assert everything(another) == everything(undisturbed(4))
            finally:
                if old.poll() is None:
                    old.kill()
    ended = {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in told.splitlines()}
    assert ended.pop("read") == "done"
    assert ended.pop("commit").startswith("StoreFailed the commit of version 2 broke off")
    assert set(ended) == {"again", "next", "put", "delete", "clear", "reset", "drop"}
    for what, how in ended.items():
        assert how.startswith("TakenOver "), what
        assert f"was taken over, its owner is now process {os.getpid()} on " in how, what


def test_the_one_that_wrote_last_owns_the_store(redis_url: str) -> None:
    with prepared(redis_url) as first, RedisStore(redis_url) as second:
        assert not second.create_table(SPECS["adam"])  # nothing was changed by that
        first.commit(commit_of(2))
        second.commit(commit_of(3))
        with pytest.raises(StoreFailed, match="was taken over"):
            first.commit(commit_of(4))
        first.lookup({"adam": IDS}, 3)
        first.take_over()
        first.commit(commit_of(4))
        with pytest.raises(StoreFailed, match="was taken over"):
            second.delete("adam", IDS)
        assert everything(first) == everything(undisturbed(4))


def test_readers_and_other_namespaces_are_left_alone(redis_url: str) -> None:
    elsewhere = [f"{redis_url}?namespace=other", f"{redis_url}/3", f"{redis_url}?namespace=elastable/2"]
    with prepared(redis_url) as store, RedisReader(redis_url) as reader:
        others = [prepared(url) for url in elsewhere]
        reader.lookup({"adam": IDS})
        with redis.Redis.from_url(redis_url) as client:
            before = {line["id"] for line in client.client_list()}
            ours = {line["id"] for line in client.client_list() if line["name"].startswith("elastable:0:elastable:")}
            store.take_over()
            after = {line["id"] for line in client.client_list()}
        assert before - after == ours
        for other in others:
            other.commit(commit_of(2))
            other.close()


def test_a_server_that_forbids_to_end_connections(
    redis_node: Server, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with redis_node.client() as client:
        client.execute_command("ACL", "SETUSER", "meek", "on", ">secret", "~*", "+@all", "-client|kill", "-client|list")
        meek = redis_url.replace("://", "://meek:secret@")
        try:
            with prepared(redis_url) as old, RedisStore(meek) as successor:
                successor.commit(commit_of(2))
                assert "does not let this user end the connections of other writers (NOPERM" in caplog.text
                with pytest.raises(StoreFailed, match="was taken over"):  # which it reads before it writes
                    old.commit(commit_of(3))
        finally:
            client.execute_command("ACL", "DELUSER", "meek")


def test_two_that_take_over_at_once(redis_url: str) -> None:
    with prepared(redis_url) as store:
        store.commit(commit_of(2))
    stores = [RedisStore(redis_url) for _ in range(4)]
    ended: list[object] = []

    def run(store: RedisStore) -> None:
        try:
            store.take_over()
            store.commit(commit_of(3))
            ended.append(store)
        except (StoreFailed, StaleVersion) as error:  # another one took over later, or had committed before
            ended.append(str(error))

    threads = [threading.Thread(target=run, args=(store,), daemon=True) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE_S)
        assert not thread.is_alive()
    assert len(ended) == len(stores)
    with RedisStore(redis_url) as last:
        last.recover()
        assert everything(last) == everything(undisturbed(last.version()))
        for version in range(last.version() + 1, 5):
            last.commit(commit_of(version))
        assert everything(last) == everything(undisturbed(4))
        np.testing.assert_array_equal(
            last.lookup({"adam": IDS}, 4)["adam"], undisturbed(4).lookup({"adam": IDS})["adam"]
        )
    for store in stores:
        store.close()
