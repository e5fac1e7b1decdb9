"""What goes wrong with a Redis server is an error with its address, never a made-up row."""

import asyncio
import os
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import redis

from elastable.embedding_store import Commit, MemoryStore, RowSource, TableSpec, TableUpdate
from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.errors import (
    BadInput,
    DeadlineExceeded,
    ElastableError,
    NotReady,
    StoreBroken,
    StoreFailed,
    Unavailable,
)
from elastable.embedding_store.open_store import open_reader, open_store
from elastable.embedding_store.support.retry import retry
from elastable.embedding_store.tiers.redis.schema import partition_of
from tests.certificates import Authority
from tests.contracts.store_samples import create_tables
from tests.cutting_proxy import cutting_proxy
from tests.embedding_store.disturbed_job import IDS, SPECS, commit_of, everything, undisturbed
from tests.servers import Server, running_cluster, running_server
from tests.waiting import until

pytestmark = pytest.mark.process


def redis_store(url: str) -> MemoryStore:
    store = open_store(url)
    assert isinstance(store, MemoryStore)
    return store


def flushed(url: str) -> MemoryStore:
    """A store at version 1, whose rows have been written to the server; `flush=` keeps later ones from it."""
    mark = "&" if "?" in url else "?"
    store = create_tables(redis_store(f"{url}{mark}flush=3600"), *SPECS.values())
    store.commit(commit_of(1))
    store.flush()
    return store


def adam(source: RowSource) -> Float32:
    return source.lookup({"adam": IDS})["adam"]


def committed_and_flushed(store: MemoryStore) -> None:
    store.commit(commit_of(2))
    store.flush()


# -- reaching a server


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(Unavailable, match=rf"127\.0\.0\.1:{port} cannot be reached.*7 s"):
        open_store(f"redis://me:secret@127.0.0.1:{port}?deadline=7")


@pytest.mark.parametrize("opened", [open_store, open_reader])
def test_a_server_that_never_answers(opened: Callable[[str], object]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(DeadlineExceeded, match=rf"127\.0\.0\.1:{port} within the deadline of 0\.3 s"):
            opened(f"redis://127.0.0.1:{port}?deadline=0.3")


def test_an_unknown_host() -> None:
    with pytest.raises(Unavailable, match=r"nowhere\.invalid:6379"):
        open_store("redis://nowhere.invalid?deadline=60")


def test_the_next_seed_is_asked(redis_cluster_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dead = f"127.0.0.1:{silent.getsockname()[1]}"
        seeds = redis_cluster_url.removeprefix("redis://")
        with open_reader(f"redis://{dead},{seeds}?deadline=4") as reader:
            assert reader.version() == 0


def test_several_servers_that_are_no_cluster(redis_url: str) -> None:
    with pytest.raises(BadInput, match="no node of a Cluster"):
        open_store(f"{redis_url},127.0.0.1:1")


def test_a_database_that_is_not_there(redis_url: str) -> None:
    with pytest.raises(StoreFailed, match=r"refused the login.*out of range"):
        open_store(f"{redis_url}/9999")


@pytest.mark.parametrize("login", ["", "me:secret@"])  # redis-py reads the answer, or we do
def test_a_server_that_speaks_something_else(login: str) -> None:
    answer = b"HTTP/1.1 400 Bad Request\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        listener.settimeout(60)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)
                connection.recv(1000)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(StoreFailed, match=rf"127\.0\.0\.1:{port} speaks no Redis"):
            open_store(f"redis://{login}127.0.0.1:{port}?deadline=60")
        thread.join(60)


def test_login(server_binary: Path, tmp_path: Path) -> None:
    with running_server(server_binary, tmp_path / "locked", password="right&secret") as server:
        with pytest.raises(StoreFailed, match=rf"127\.0\.0\.1:{server.port} refused the login.*WRONGPASS") as refused:
            open_store(f"redis://:wrongsecret@{server.address}")
        assert "secret" not in str(refused.value)
        with pytest.raises(
            StoreFailed,
            match=r"NOAUTH.*no password: set ELASTABLE_REDIS_PASSWORD_FILE, or write redis://user:password@host:port",
        ):
            open_store(server.url)
        with pytest.raises(StoreFailed, match=r"WRONGPASS.*is not that of user 'nobody'"):
            open_reader(f"redis://nobody:wrongsecret@{server.address}")
        with open_store(f"redis://:right%26secret@{server.address}/3") as store:
            assert store.create_table(SPECS["sgd"])


@pytest.fixture(params=["redis_node", "valkey_node"])
def documented_users(request: pytest.FixtureRequest) -> Iterator[Server]:
    node: Server = request.getfixturevalue(request.param)
    text = (Path(__file__).parents[4] / "docs" / "redis.md").read_text()
    lines = [line.split() for line in text.splitlines() if line.startswith("    ACL SETUSER")]
    assert [words[2] for words in lines] == ["master", "reader"]
    with node.client() as client:
        client.flushall()
        for words in lines:
            client.execute_command(*words)
        yield node
        client.execute_command("ACL", "DELUSER", "master", "reader")


def test_users_as_documented(documented_users: Server) -> None:
    master, reader_user = (f"redis://{user}:secret@{documented_users.address}" for user in ("master", "reader"))
    with flushed(master) as store:
        store.clear("adam")
        store.put("adam", [])
        store.reset_version(1)
        with open_reader(reader_user, follow=True) as reader, open_reader(reader_user) as of_flushed:
            store.commit(commit_of(2))
            np.testing.assert_array_equal(reader.lookup({"sgd": IDS}, 2)["sgd"], store.lookup({"sgd": IDS})["sgd"])
            store.flush()
            np.testing.assert_array_equal(of_flushed.lookup({"sgd": IDS})["sgd"], store.lookup({"sgd": IDS})["sgd"])
            assert reader.version() == of_flushed.version() == 2
        store.drop_table("adagrad")
    with open_store(f"{master}?budget=1MiB") as again:  # after a clean end: scans the rows
        assert again.version() == 2
        again.commit(commit_of(3, ("sgd",)))
    with (
        open_store(reader_user) as store,
        pytest.raises(StoreFailed, match=r"NOPERM.*\(user 'reader' of the store's URL may not do that"),
    ):
        store.commit(commit_of(4, ("sgd",)))
    with pytest.raises(StoreFailed, match="NOPERM"):
        open_reader(f"{reader_user}?namespace=other")


@pytest.fixture
def tls_port(redis_node: Server, ours: Authority) -> Iterator[int]:
    """Where TLS is taken off what goes to a server: not every server is built with it."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*ours.issue("redis", "localhost", "127.0.0.1"))

    async def forward(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while received := await source.read(1 << 16):
            target.write(received)
            await target.drain()
        target.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, asked = await asyncio.open_connection("127.0.0.1", redis_node.port)
        await asyncio.gather(forward(reader, asked), forward(answers, writer), return_exceptions=True)

    with asyncio.Runner() as runner:
        server = runner.run(asyncio.start_server(serve, "127.0.0.1", 0, ssl=context))
        thread = threading.Thread(target=runner.get_loop().run_forever)
        thread.start()
        yield server.sockets[0].getsockname()[1]
        runner.get_loop().call_soon_threadsafe(runner.get_loop().stop)
        thread.join()
        server.close()


def test_tls(redis_url: str, tls_port: int, ours: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"rediss://127.0.0.1:{tls_port}"
    with create_tables(redis_store(f"{url}?ca={ours.ca}"), TableSpec("t", 64, None)) as store:
        ids = np.arange(5_000)
        store.commit(Commit(1, {"t": TableUpdate(ids, np.ones((5_000, 64), np.float32))}, 0, {}))
        store.flush()
        rows = store.lookup({"t": ids})["t"]
    for same in (f"{url}?ca={ours.ca}", redis_url):
        with open_reader(same) as reader:
            np.testing.assert_array_equal(reader.lookup({"t": ids})["t"], rows)
    with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
        open_store(url)
    with pytest.raises(BadInput, match="/nowhere"):
        open_store(f"{url}?ca=/nowhere")
    monkeypatch.setenv("SSL_CERT_FILE", str(ours.ca))  # of the system
    open_reader(url).close()
    with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
        open_store(f"{url}?ca={Authority(tmp_path / 'another').ca}")


# -- a server that fails in mid-run


def test_a_killed_server_is_an_error_and_a_restarted_one_goes_on(durable: Server) -> None:
    address = durable.address.replace(".", r"\.")
    url = f"{durable.url}?deadline=4"
    with flushed(url) as store, open_reader(url) as reader:
        before = adam(reader)
        durable.kill()
        np.testing.assert_array_equal(adam(store), before)  # from memory
        for attempt in (lambda: adam(reader), lambda: store.commit(commit_of(2))):
            with pytest.raises(Unavailable, match=address):
                attempt()
        with pytest.raises(Unavailable, match="version 2 is not logged"):
            adam(store)
        durable.start()
        np.testing.assert_array_equal(adam(reader), before)
        store.commit(commit_of(2))
        assert everything(store) == everything(undisturbed(2))
        store.flush()
        np.testing.assert_array_equal(adam(reader), adam(store))


def test_a_server_that_loads_its_data_is_not_ready_yet_and_waited_for(server_binary: Path, tmp_path: Path) -> None:
    """After a restart every command is answered by LOADING until all data is read: no failure, only a delay."""
    with (
        running_server(server_binary, tmp_path) as server,
        flushed(f"{server.url}?deadline=60") as store,
        open_reader(server.url) as reader,
    ):
        before = adam(reader)
        with server.client() as client:
            client.mset({f"filler:{number}": os.urandom(250) for number in range(3_000)})
            client.save()
        server.kill()
        # A minute in all, which the test cuts short; a server that loads answers once in so many bytes.
        server.options = ("--key-load-delay", "20000", "--loading-process-events-interval-bytes", "1024")
        server.launch()
        with server.client() as client:
            until(lambda: loading(client))
            for attempt in (lambda: adam(reader), lambda: open_store(f"{server.url}?deadline=5")):
                with pytest.raises(NotReady, match=r"LOADING|is still loading its data"):
                    attempt()
            enough = threading.Timer(0.1, client.config_set, ("key-load-delay", 0))
            enough.start()
            store.commit(commit_of(2))  # waits
            after = retry(lambda: adam(reader), "a lookup", 60.0, on=(NotReady,))
            enough.join(60)
        np.testing.assert_array_equal(after, before)
        assert everything(store) == everything(undisturbed(2))


def loading(client: redis.Redis) -> bool:
    try:
        client.ping()
    except redis.exceptions.BusyLoadingError:
        return True
    except redis.ConnectionError:
        return False
    pytest.fail("the server was never seen to load")


def test_values_of_another_kind_are_errors(redis_url: str) -> None:
    key = f"{{elastable:sgd:{int(partition_of(IDS[:1], 64)[0])}}}:rows"
    flushed(redis_url).close()
    with redis.Redis.from_url(redis_url) as client, open_reader(redis_url) as reader:
        client.hset(key, bytes(8), b"short")
        with pytest.raises(StoreFailed, match="records of 20 bytes"):
            reader.lookup({"sgd": IDS})
        client.rename(key, "aside")
        client.set(key, "text")
        with pytest.raises(StoreFailed, match="WRONGTYPE"):
            reader.lookup({"sgd": IDS})
        client.rename("aside", key)
        for name, field in (("tables", "sgd"), ("state", "state")):
            of_registry = f"{{elastable}}:tier:{name}"
            before = client.hget(of_registry, field)
            client.hset(of_registry, field, "?")
            for opened in (open_store, open_reader):
                with pytest.raises(StoreBroken):
                    opened(redis_url)
            client.hset(of_registry, field, before)


def test_connections_that_died_idle_are_replaced(redis_url: str) -> None:
    with flushed(redis_url) as store, open_reader(redis_url) as reader, redis.Redis.from_url(redis_url) as client:
        before = adam(store)
        client.client_kill_filter(_type="normal", skipme=True)
        np.testing.assert_array_equal(adam(reader), before)
        client.client_kill_filter(_type="normal", skipme=True)
        store.commit(commit_of(2))
        client.client_kill_filter(_type="normal", skipme=True)
        store.flush()
        assert everything(store) == everything(undisturbed(2))
        np.testing.assert_array_equal(adam(reader), adam(store))


def test_a_stalled_server(fleeting: Server) -> None:
    url = f"{fleeting.url}?deadline=4"
    with flushed(url) as store, open_reader(url) as reader:
        before = adam(reader)
        assert fleeting.process is not None
        fleeting.process.send_signal(signal.SIGSTOP)
        try:
            for attempt in (lambda: adam(reader), lambda: store.commit(commit_of(2))):
                with pytest.raises(DeadlineExceeded, match=r"within the deadline of 4 s"):
                    attempt()
        finally:
            fleeting.process.send_signal(signal.SIGCONT)
        np.testing.assert_array_equal(adam(reader), before)
        store.commit(commit_of(2))
        assert everything(store) == everything(undisturbed(2))


@pytest.mark.parametrize("ending", ["cut", "kill"])
def test_a_commit_whose_answer_is_lost_is_made_once(durable: Server, ending: str) -> None:
    with cutting_proxy(durable.port) as proxy, flushed(f"redis://127.0.0.1:{proxy.port}?deadline=4") as store:
        proxy.transactions = 1  # the one that appends to the log
        if ending == "kill":
            proxy.when_cut = durable.kill
            with pytest.raises(Unavailable):
                store.commit(commit_of(2))
            durable.start()
        store.commit(commit_of(2))
        assert proxy.transactions is None
        store.commit(commit_of(3))
        assert everything(store) == everything(undisturbed(3))
        with open_reader(durable.url, follow=True) as reader:
            assert reader.version() == 3
            np.testing.assert_array_equal(adam(reader), adam(store))


def test_a_killed_node_of_a_cluster(server_binary: Path, tmp_path: Path) -> None:
    with running_cluster(server_binary, tmp_path) as servers:
        store = flushed(f"{servers[0].url}?deadline=4")
        with open_reader(servers[0].url) as reader:
            adam(reader)
            servers[2].kill()
            with pytest.raises((Unavailable, StoreFailed), match=servers[2].address.replace(".", r"\.")):
                adam(reader)
            with pytest.raises((Unavailable, StoreFailed)):
                committed_and_flushed(store)
        with suppress(Unavailable, StoreFailed):  # where the log's node is alive, rows are left to be written
            store.close()


@pytest.mark.parametrize("flush", ["1000", "0.01"])
def test_a_store_that_is_closed_comes_back_without_them(durable: Server, flush: str) -> None:
    store = create_tables(open_store(f"{durable.url}?flush={flush}", deadline_s=3.0), *SPECS.values())
    store.commit(commit_of(1))
    durable.kill()
    with pytest.raises(ElastableError):
        store.commit(commit_of(2))
    durable.start()
    store.close()
    with open_store(durable.url) as again, undisturbed(1) as expected:
        assert again.version() == 1
        assert everything(again) == everything(expected)
