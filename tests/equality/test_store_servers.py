"""Jobs over store servers train the numbers of a job whose rows are with its master, whoever dies."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.shards.server_contract import Committed, PushedCommit
from elastable.embedding_store.wire.remote_source import RemoteSource
from elastable.jobs.servers.store_registry import StoreRegistry
from tests.embedding_store.shards.served_shards import served
from tests.equality.jobs import Numbers, Running, differing, train
from tests.ports import free_port
from tests.preloaded.client import HERE, Interpreter, PreloadedProcess

ROOT = Path(__file__).parents[2]
START_S = 120.0


class StoreProcess:
    """`elastable store` in a process, started again where it was; with the command `serve` a parameter server."""

    def __init__(self, log: Path, store: str, *more: str, command: str = "store", of: Interpreter = HERE) -> None:
        self._log, self._store, self._more, self._command, self._of = log, store, more, command, of
        self.address = f"127.0.0.1:{free_port()}"
        self.start()

    def start(self) -> None:
        words = ["-m", "elastable", self._command, "--listen", self.address, "--store", self._store, *self._more]
        with self._log.open("ab") as output:
            self.process = PreloadedProcess(words, output, output, ROOT, of=self._of)
        with RemoteSource(self.address, START_S) as rows:
            rows.version()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=60)


Servers = Callable[..., list[StoreProcess]]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with ExitStack() as held:

        def start(*urls: str) -> list[StoreProcess]:
            started = []
            for number, url in enumerate(urls):
                started.append(StoreProcess(tmp_path / f"store-{number}.log", url))
                held.callback(started[-1].kill)
            return started

        yield start


@pytest.mark.parametrize(
    ("count", "workers", "cut"), [pytest.param(1, 1, "token", marks=pytest.mark.slow), (3, 2, "encoding")]
)
def test_numbers_do_not_depend_on_store_servers(
    alone: Numbers, tmp_path: Path, servers: Servers, redis_url: str, count: int, workers: int, cut: str
) -> None:
    places = ("memory", f"{redis_url}?namespace=store", f"file://{tmp_path}/rows?budget=1MiB&flush=0.01")
    started = servers(*places[:count])
    stores = [f"dns://{started[0].address}?count=1"] if count == 1 else [server.address for server in started]
    ours = train(tmp_path, workers, "adagrad", stores=stores, options=("--partition", cut))
    assert differing(alone, ours) == []


@pytest.mark.slow  # tests/elastable/test_assembly.py prepares such a job
def test_small_tables_stay_on_the_workers_beside_store_servers(tmp_path: Path, servers: Servers) -> None:
    file = tmp_path / "locations.toml"
    file.write_text("[weight]\nmin_elements_for_off_worker = 300\n")
    stores = [server.address for server in servers("memory", "memory")]
    placed = ("--locations", str(file))
    ours = train(tmp_path / "one", 2, "adagrad", stores=stores, options=placed)
    assert 0 < len([name for name in ours if name.endswith("/ids")]) < 3
    assert differing(train(tmp_path / "two", 1, "adagrad", options=placed), ours) == []


@pytest.mark.parametrize(
    ("held", "applies"),
    [pytest.param(0, False, marks=pytest.mark.slow), pytest.param(1, False, marks=pytest.mark.slow), (1, True)],
)
def test_the_master_is_killed_in_mid_commit(alone: Numbers, tmp_path: Path, held: int, applies: bool) -> None:
    """One store server has the version, and the master dies before it hears whether the other one has it too."""
    with served(2, tmp_path / "logs") as (servers, store):
        stores = [server.address for server in servers]
        assert store.version() == 0
        began, died = threading.Event(), threading.Event()
        commit = servers[held].shard.commit

        def in_mid_commit(pushed: PushedCommit, secret: bytes) -> Committed:
            if pushed.version != 12 or died.is_set():
                return commit(pushed, secret)
            made = commit(pushed, secret) if applies else None
            began.set()
            assert died.wait(180)
            if made is None:
                raise StoreFailed("the connection broke before the store server read the commit")
            return made

        servers[held].shard.commit = in_mid_commit  # type: ignore[method-assign, assignment]

        def kill(job: Running) -> None:
            assert began.wait(180), "version 12 was never begun"
            with RemoteSource(stores[1 - held], 60.0) as other:
                assert other.wait_for_version(12, 60.0)
            job.processes[0].kill()
            assert servers[1 - held].store.version() == 12
            assert servers[held].store.version() == (12 if applies else 11)
            died.set()
            job.start_master("--resume", "--listen", job.address)

        assert differing(alone, train(tmp_path, 2, "adagrad", stores=stores, during=kill)) == []


def test_a_registered_store_server_is_killed_and_has_its_number_again(
    alone: Numbers, tmp_path: Path, redis_url: str
) -> None:
    """Masters find the servers by a registry in Redis, whatever order they started in, and wherever they come back."""
    registry = f"{redis_url}?namespace=elastable/registry&count=2"
    words = ["--register", registry]
    with ExitStack() as held:
        started = []
        for number in (1, 0):
            started.append(StoreProcess(tmp_path / f"store-{number}.log", redis_url, *words, "--number", str(number)))
            held.callback(started[-1].kill)

        def kill(job: Running) -> None:
            job.until_version(8)
            started[0].kill()
            started[0].address = f"127.0.0.1:{free_port()}"
            started[0].start()

        assert differing(alone, train(tmp_path, 2, "adagrad", stores=[registry], during=kill)) == []
        with StoreRegistry(registry) as found:
            assert found.addresses(60.0) == [started[1].address, started[0].address]
