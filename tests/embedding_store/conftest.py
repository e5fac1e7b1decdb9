"""What tests hold until their end: servers to be killed and restarted, and anything else."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.servers import Server, running_server

DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as held:
        yield held


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
