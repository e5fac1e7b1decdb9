"""The Redis of Compose and of Kubernetes, started as it is there: what it logged outlives it, and who may do what."""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
import yaml
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.ports import free_port
from tests.servers import redis_binary, valkey_binary
from tests.waiting import until

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
BINARIES = [binary for binary in (redis_binary(), valkey_binary()) if binary]
PASSWORDS = {"master": "one", "reader": "two"}
START_S = 60.0


def script_of_compose() -> str:
    command: list[str] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["redis"]["command"]
    return command[-1].replace("$$", "$")


def script_of_kubernetes() -> str:
    documents = yaml.safe_load_all((ROOT / "deploy/kubernetes/redis/redis.yaml").read_text())
    (found,) = [one for one in documents if one["kind"] == "StatefulSet"]
    command: list[str] = found["spec"]["template"]["spec"]["containers"][0]["command"]
    return command[-1]


@contextmanager
def running(script: str, binary: Path, folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The container's command, in a separate folder; killed at the end."""
    for there, here in (("/tmp/users.acl", str(folder / "users.acl")), ("--dir /data", f"--dir {folder}")):
        assert there in script
        script = script.replace(there, here)
    script = script.replace("exec redis-server", f"exec {binary} --bind 127.0.0.1 --port {port} --logfile {folder}/log")
    variables = {
        "ELASTABLE_REDIS_PASSWORD": PASSWORDS["master"],
        "ELASTABLE_REDIS_READER_PASSWORD": PASSWORDS["reader"],
        "REDIS_MEMORY": "0",
    }
    process = subprocess.Popen(["sh", "-c", script], env={**os.environ, **variables})
    try:
        yield process
    finally:
        process.kill()
        process.wait(START_S)


def client(port: int, user: str | None, password: str | None = None) -> redis.Redis:
    # What asks again by itself does so after seconds.
    return redis.Redis(port=port, username=user, password=password, socket_timeout=START_S, retry=Retry(NoBackoff(), 0))


def answers(port: int) -> bool:
    try:
        with client(port, "health", "none") as asked:
            return bool(asked.ping())
    except (redis.ConnectionError, redis.exceptions.BusyLoadingError):
        return False


each_script = pytest.mark.parametrize(
    "script", [script_of_compose(), script_of_kubernetes()], ids=["compose", "kubernetes"]
)


@each_script
def test_users_are_those_of_the_page(script: str) -> None:
    page = re.findall(r"ACL SETUSER (master|reader) on >secret (.+)", (ROOT / "docs/redis.md").read_text())
    assert len(page) == 2
    for user, rules in page:
        password = {"master": "ELASTABLE_REDIS_PASSWORD", "reader": "ELASTABLE_REDIS_READER_PASSWORD"}[user]
        assert f"user {user} on >${password} {rules}\n" in script
    assert "user health on nopass +ping\n" in script


@pytest.mark.parametrize("binary", BINARIES, ids=lambda path: path.name)
@each_script
def test_transactions_outlive_the_server_and_nobody_has_more_rights_than_its_user(
    script: str, binary: Path, tmp_path: Path
) -> None:
    port = free_port()
    rows = {f"{{elastable}}:{name}": name.encode() for name in ("a", "b", "c")}
    with running(script, binary, tmp_path, port):
        until(lambda: answers(port))
        with client(port, "master", PASSWORDS["master"]) as master:
            pipeline = master.pipeline(transaction=True)
            for key, value in rows.items():
                pipeline.set(key, value)
            pipeline.execute()
            # Written, which a slow disk may delay.
            until(lambda: master.info("persistence")["aof_buffer_length"] == 0)
    with running(script, binary, tmp_path, port):
        until(lambda: answers(port))
        with client(port, "reader", PASSWORDS["reader"]) as reader:
            # An append-only file is loaded with the rights of the user "default", who is off.
            assert reader.mget(*rows) == list(rows.values())
            with pytest.raises(redis.exceptions.NoPermissionError):
                reader.set("{elastable}:a", b"0")
            with pytest.raises(redis.exceptions.NoPermissionError):
                reader.get("another's")
        with client(port, "health", "none") as health, pytest.raises(redis.exceptions.NoPermissionError):
            health.get("{elastable}:a")
        for user, password in ((None, None), ("default", "none"), ("default", "one"), ("reader", PASSWORDS["master"])):
            with client(port, user, password) as stranger, pytest.raises(redis.exceptions.AuthenticationError):
                stranger.get("{elastable}:a")
