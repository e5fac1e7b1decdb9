"""A server that lacks data, or may lose some, is waited for or refused by name when a store is opened."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import redis

from elastable.embedding_store import IndexedSlices, InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.errors import NotReady, StoreFailed
from elastable.embedding_store.open_store import open_reader, open_store
from tests.embedding_store.conftest import DURABLE
from tests.ports import free_port
from tests.servers import START_S, Server, running_server, valkey_binary
from tests.waiting import until

pytestmark = pytest.mark.process

IDS = np.arange(200)
DIM = 256  # a server that loads looks at its connections every KiB
SGD = OptimizerSpec.of("sgd", learning_rate=1.0)


def filled(server: Server) -> None:
    """A store with rows whose weights are their ids."""
    with open_store(server.url) as store:
        users = store.table(TableSpec("users", DIM, initializer=InitializerSpec("zeros"), optimizer=SGD))
        users.update(None, IndexedSlices(-np.repeat(IDS[:, None], DIM, axis=1).astype(np.float32), IDS))


def rows_at(url: str) -> list[float]:
    with open_reader(url) as reader:
        return [float(one) for one in reader.lookup({"users": IDS})["users"][:, 0]]


def replica_of(binary: Path, folder: Path, port: int) -> Iterator[Server]:
    with running_server(binary, folder, ("--replicaof", f"127.0.0.1 {port}")) as server:
        yield server


@pytest.fixture(params=["redis", "valkey"])
def kind(request: pytest.FixtureRequest, server_binary: Path) -> Path:
    binary = server_binary if request.param == "redis" else valkey_binary()
    if binary is None:
        pytest.skip("no valkey-server")
    return binary


@pytest.fixture
def master(kind: Path, tmp_path: Path) -> Iterator[Server]:
    with running_server(kind, tmp_path / "master", DURABLE) as server:
        filled(server)
        yield server


@pytest.fixture
def cut_off(kind: Path, tmp_path: Path) -> Iterator[Server]:
    """A replica that has never reached its master."""
    yield from replica_of(kind, tmp_path / "cut_off", free_port())


@pytest.mark.parametrize("opened", [open_store, open_reader])
def test_a_replica_that_never_had_the_rows_is_no_empty_store(cut_off: Server, opened: type) -> None:
    said = rf"redis at {cut_off.address} is a replica that is not in step with its master 127.0.0.1:"
    with pytest.raises(NotReady, match=said) as kept:  # with all that was made
        opened(f"{cut_off.url}?deadline=0.5")
    with cut_off.client() as client:
        until(lambda: len(client.client_list(_type="normal")) == 1)
    del kept


def test_a_replica_is_waited_for_while_it_takes_its_data(master: Server, kind: Path, tmp_path: Path) -> None:
    assert master.process is not None
    os.kill(master.process.pid, signal.SIGSTOP)
    replica = replica_of(kind, tmp_path / "replica", master.port)
    try:
        server = next(replica)
        with server.client() as client, ThreadPoolExecutor(1) as opening:
            assert client.info("replication")["master_link_status"] == "down"
            before = client.info("stats")["total_connections_received"]
            rows = opening.submit(rows_at, f"{server.url}?deadline={START_S}")
            until(lambda: client.info("stats")["total_connections_received"] > before)
            os.kill(master.process.pid, signal.SIGCONT)
            assert rows.result(START_S) == IDS.tolist()
            with pytest.raises(StoreFailed, match=rf"a replica of 127.0.0.1:{master.port} and takes no writes: name"):
                open_store(server.url)
    finally:
        os.kill(master.process.pid, signal.SIGCONT)
        replica.close()  # type: ignore[attr-defined]


def test_a_server_that_loads_its_data_is_waited_for(kind: Path, tmp_path: Path) -> None:
    server = Server(kind, tmp_path)
    try:
        server.start()
        filled(server)
        with server.client() as client:
            client.save()
        server.kill()
        # A key takes long to load, and others are answered meanwhile.
        server.options = ("--key-load-delay", "60000", "--loading-process-events-interval-bytes", "1024")
        server.launch()
        until(lambda: _is_loading(server))
        assert rows_at(f"{server.url}?deadline={START_S}") == IDS.tolist()
    finally:
        server.kill()


def _is_loading(server: Server) -> bool:
    try:
        with server.client() as client:
            return bool(client.info("persistence")["loading"])
    except redis.ConnectionError:
        return False


@pytest.mark.parametrize(("policy", "maxmemory"), [("allkeys-lru", 0), ("volatile-ttl", 1 << 30)])
def test_a_server_that_may_evict_rows_is_refused_at_opening(master: Server, policy: str, maxmemory: int) -> None:
    with master.client() as client:
        client.config_set("maxmemory", maxmemory)
        client.config_set("maxmemory-policy", policy)
        said = rf"redis at {master.address} has maxmemory-policy {policy}.*-policy noeviction.*{maxmemory} now"
        with pytest.raises(StoreFailed, match=said):
            open_store(master.url)
        assert rows_at(master.url) == IDS.tolist()  # who only reads can do nothing about it
        client.config_set("maxmemory-policy", "noeviction")
    open_store(master.url).close()
