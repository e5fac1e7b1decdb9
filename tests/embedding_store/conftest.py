"""What tests hold until their end; servers of several kinds, and servers to be killed and restarted."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.servers import Server, running_server

DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as held:
        yield held


@pytest.fixture(scope="session")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(params=["redis_url", "valkey_url", "redis_cluster_url"])
def any_server_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(request.param)
    return url


@pytest.fixture(params=["redis_url", "redis_cluster_url"])
def node_or_cluster_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(request.param)
    return url


@pytest.fixture
def meek_url(redis_node: Server, redis_url: str) -> Iterator[str]:
    """With the login of a user who may do everything but end connections."""
    with redis_node.client() as client:
        client.execute_command("ACL", "SETUSER", "meek", "on", ">secret", "~*", "+@all", "-client|kill", "-client|list")
        yield redis_url.replace("://", "://meek:secret@")
        client.execute_command("ACL", "DELUSER", "meek")


@pytest.fixture
def durable(server_binary: Path, tmp_path: Path) -> Iterator[Server]:
    """A server for this test alone that keeps what it confirmed."""
    with running_server(server_binary, tmp_path / "durable", DURABLE) as server:
        yield server


@pytest.fixture
def fleeting(server_binary: Path, tmp_path: Path) -> Iterator[Server]:
    """A server for this test alone that forgets everything when it ends."""
    with running_server(server_binary, tmp_path / "fleeting") as server:
        yield server
