"""What goes wrong with a Redis server is an error with its address, never a made-up row."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import redis

from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import BadInput, DeadlineExceeded, NotReady, StoreFailed, Unavailable
from elastable.embedding_store.support.retry import retry
from elastable.embedding_store.tiers.redis.redis_reader import RedisReader
from elastable.embedding_store.tiers.redis.redis_store import RedisStore
from elastable.embedding_store.tiers.redis.schema import partition_of
from tests.embedding_store.disturbed_job import IDS, SPECS, commit_of, everything, prepared, undisturbed
from tests.ports import free_port
from tests.servers import Server, running_cluster, running_server

pytestmark = pytest.mark.process

# -- reaching a server


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(Unavailable, match=rf"127\.0\.0\.1:{port} cannot be reached.*7 s"):
        RedisStore(f"redis://me:secret@127.0.0.1:{port}?deadline=7")


def test_a_server_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(DeadlineExceeded, match=rf"127\.0\.0\.1:{port} within the deadline of 0\.3 s"):
            RedisReader(f"redis://127.0.0.1:{port}?deadline=0.3")


def test_an_unknown_host() -> None:
    with pytest.raises(Unavailable, match=r"nowhere\.invalid:6379"):
        RedisStore("redis://nowhere.invalid?deadline=5")


def test_the_next_seed_is_asked(redis_cluster_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dead = f"127.0.0.1:{silent.getsockname()[1]}"
        seeds = redis_cluster_url.removeprefix("redis://")
        with RedisReader(f"redis://{dead},{seeds}?deadline=4") as reader:
            assert reader.version() == 0


def test_several_servers_that_are_no_cluster(redis_url: str) -> None:
    with pytest.raises(BadInput, match="no node of a Cluster"):
        RedisStore(f"{redis_url},127.0.0.1:1")


def test_a_database_that_is_not_there(redis_url: str) -> None:
    with pytest.raises(StoreFailed, match=r"refused the login.*out of range"):
        RedisStore(f"{redis_url}/9999")


def test_a_server_that_speaks_something_else() -> None:
    answer = b"HTTP/1.1 400 Bad Request\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        listener.settimeout(10)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)
                connection.recv(1000)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(StoreFailed, match=rf"127\.0\.0\.1:{port} speaks no Redis"):
            RedisStore(f"redis://127.0.0.1:{port}?deadline=5")
        thread.join(10)


def test_login(server_binary: Path, tmp_path: Path) -> None:
    with running_server(server_binary, tmp_path / "locked", password="right&secret") as server:
        with pytest.raises(StoreFailed, match=rf"127\.0\.0\.1:{server.port} refused the login.*WRONGPASS") as refused:
            RedisStore(f"redis://:wrongsecret@{server.address}")
        assert "secret" not in str(refused.value)
        with pytest.raises(
            StoreFailed,
            match=r"NOAUTH.*no password: set ELASTABLE_REDIS_PASSWORD_FILE, or write redis://user:password@host:port",
        ):
            RedisStore(server.url)
        with pytest.raises(StoreFailed, match=r"WRONGPASS.*is not that of user 'nobody'"):
            RedisReader(f"redis://nobody:wrongsecret@{server.address}")
        with RedisStore(f"redis://:right%26secret@{server.address}/3") as store:
            assert store.create_table(SPECS["sgd"])


@pytest.fixture
def documented_users(redis_node: Server) -> Iterator[None]:
    """The users that docs/redis.md sets up."""
    text = (Path(__file__).parents[4] / "docs" / "redis.md").read_text()
    lines = [line.split() for line in text.splitlines() if line.startswith("    ACL SETUSER")]
    assert [words[2] for words in lines] == ["master", "worker"]
    with redis_node.client() as client:
        for words in lines:
            client.execute_command(*words)
        yield
        client.execute_command("ACL", "DELUSER", "master", "worker")


@pytest.mark.usefixtures("documented_users")
def test_users_as_documented(redis_url: str) -> None:
    master, worker = (redis_url.replace("://", f"://{user}:secret@") for user in ("master", "worker"))
    with prepared(master) as store, RedisReader(worker) as reader:
        store.clear("adam")
        store.put("adam", [])
        store.reset_version(1)
        store.commit(commit_of(2))
        assert store.row_count("sgd") == len(next(iter(store.scan("sgd"))).ids)
        np.testing.assert_array_equal(reader.lookup({"sgd": IDS}, 2)["sgd"], store.lookup({"sgd": IDS})["sgd"])
    with RedisStore(worker) as store:
        with pytest.raises(StoreFailed, match=r"NOPERM.*\(user 'worker' of the store's URL may not do that"):
            store.commit(commit_of(3))
        with pytest.raises(StoreFailed, match="NOPERM"):
            store.pin()
    with RedisStore(master) as store, store.pin() as pin:
        store.commit(commit_of(3))
        with RedisReader(worker) as reader:
            np.testing.assert_array_equal(reader.lookup({"sgd": IDS}, 2)["sgd"], pin.lookup({"sgd": IDS})["sgd"])
    with RedisReader(f"{worker}?namespace=other") as elsewhere, pytest.raises(StoreFailed, match="NOPERM"):
        elsewhere.version()


@pytest.fixture
def tls_server(server_binary: Path, tmp_path: Path) -> Iterator[tuple[Server, int, Path]]:
    """A server, the port where it speaks TLS, and its certificate."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    port = free_port()
    options = ("--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key),
               "--tls-ca-cert-file", str(certificate), "--tls-auth-clients", "no")  # fmt: skip
    with ExitStack() as stack:
        try:
            server = stack.enter_context(running_server(server_binary, tmp_path / "tls", options))
        except RuntimeError:
            pytest.skip(f"{server_binary} was built without TLS")
        yield server, port, certificate


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_tls(tls_server: tuple[Server, int, Path]) -> None:
    server, port, certificate = tls_server
    with RedisStore(f"rediss://127.0.0.1:{port}?ca={certificate}") as store, RedisReader(server.url) as plain:
        store.create_table(TableSpec("t", 64, None))
        ids = np.arange(5_000)
        store.commit(Commit(1, {"t": TableUpdate(ids, np.ones((5_000, 64), np.float32))}, 0, {}))
        np.testing.assert_array_equal(store.lookup({"t": ids})["t"], plain.lookup({"t": ids})["t"])
    with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
        RedisStore(f"rediss://127.0.0.1:{port}")
    with pytest.raises(BadInput, match="/nowhere"):
        RedisStore(f"rediss://127.0.0.1:{port}?ca=/nowhere")


# -- a server that fails in mid-run


def test_a_killed_server_is_an_error_and_a_restarted_one_goes_on(durable: Server) -> None:
    with prepared(durable.url) as store, RedisReader(durable.url) as reader:
        before = reader.lookup({"adam": IDS})["adam"]
        durable.kill()
        for source in (store, reader):
            with pytest.raises(Unavailable, match=durable.address.replace(".", r"\.")):
                source.lookup({"adam": IDS})
        with pytest.raises(Unavailable, match=durable.address.replace(".", r"\.")):
            store.commit(commit_of(2))
        durable.start()
        np.testing.assert_array_equal(reader.lookup({"adam": IDS}, version=1)["adam"], before)
        store.commit(commit_of(2))
        assert everything(store) == everything(undisturbed(2))


def test_a_server_that_loads_its_data_is_not_ready_yet_and_waited_for(server_binary: Path, tmp_path: Path) -> None:
    """After a restart every command is answered by LOADING until all data is read: no failure, only a delay."""
    with (
        running_server(server_binary, tmp_path) as server,
        prepared(server.url) as store,
        RedisStore(server.url) as other,
    ):
        before = store.lookup({"adam": IDS})["adam"]
        with server.client() as client:
            client.mset({f"filler:{number}": os.urandom(250) for number in range(3_000)})
            client.save()
        server.kill()
        # A minute in all, which the test cuts short; a server that loads answers once in so many bytes.
        server.options = ("--key-load-delay", "20000", "--loading-process-events-interval-bytes", "1024")
        server.launch()
        with server.client() as client:
            until_loading(client)
            for call in (lambda: store.lookup({"adam": IDS}), other.version):
                with pytest.raises(NotReady, match="LOADING"):
                    call()
            enough = threading.Timer(0.1, client.config_set, ("key-load-delay", 0))
            enough.start()
            after = retry(lambda: store.lookup({"adam": IDS})["adam"], "a lookup", 60.0, on=(NotReady,))
            enough.join(30)
        np.testing.assert_array_equal(after, before)
        store.commit(commit_of(2))
        assert everything(store) == everything(undisturbed(2))


def until_loading(client: redis.Redis) -> None:
    """Returns once the server answers that it is loading."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            client.ping()
        except redis.exceptions.BusyLoadingError:
            return
        except redis.ConnectionError:
            time.sleep(0.01)
        else:
            break
    pytest.fail("the server was never seen to load")


def test_a_server_that_came_back_empty_is_an_error(fleeting: Server) -> None:
    with prepared(fleeting.url) as store:
        fleeting.kill()
        fleeting.start()
        for ids in (IDS, IDS + 5_000):
            with pytest.raises(StoreFailed, match=r"has lost partition \d+ of table 'adam'"):
                store.lookup({"adam": ids})
        with pytest.raises(StoreFailed, match="has lost partition"):
            store.commit(commit_of(2))
        with pytest.raises(StoreFailed, match="has lost partition"):
            store.row_count("adam")


def test_an_evicted_partition_is_an_error(redis_url: str) -> None:
    with prepared(redis_url) as store, redis.Redis.from_url(redis_url) as client:
        held = commit_of(1).updates["adam"].ids[:1]
        partition = int(partition_of(held, 64)[0])
        client.delete(f"{{elastable:sgd:{partition}}}:weights")
        with pytest.raises(StoreFailed, match=f"has lost partition {partition} of table 'sgd'"):
            store.lookup({"adam": IDS, "sgd": held})
        client.delete(f"{{elastable:adam:{partition}}}:slots")
        with pytest.raises(StoreFailed, match=r"table 'adam'.*has lost its slots"):
            list(store.scan("adam"))


def test_values_of_another_kind_are_errors(redis_url: str) -> None:
    key = f"{{elastable:sgd:{int(partition_of(IDS[:1], 64)[0])}}}:weights"
    with prepared(redis_url) as store, redis.Redis.from_url(redis_url) as client:
        client.hset(key, bytes(8), b"short")
        with pytest.raises(StoreFailed, match="rows of 20 bytes"):
            store.lookup({"sgd": IDS})
        client.delete(key)
        client.set(key, "text")
        with pytest.raises(StoreFailed, match="WRONGTYPE"):
            store.lookup({"sgd": IDS})
        client.set("{elastable}:version", "soon")
        with pytest.raises(StoreFailed, match="no version"):
            store.lookup({"adam": IDS}, version=1)
        client.hset("{elastable}:tables", "x", "?")
        with pytest.raises(StoreFailed, match="no table record"):
            store.specs()


def test_connections_that_died_idle_are_replaced(redis_url: str) -> None:
    with prepared(redis_url) as store, redis.Redis.from_url(redis_url) as client:
        before = store.lookup({"adam": IDS})["adam"]
        client.client_kill_filter(_type="normal", skipme=True)
        np.testing.assert_array_equal(store.lookup({"adam": IDS})["adam"], before)
        client.client_kill_filter(_type="normal", skipme=True)
        store.commit(commit_of(2))
        assert everything(store) == everything(undisturbed(2))


def test_a_stalled_server(fleeting: Server) -> None:
    with prepared(f"{fleeting.url}?deadline=0.5") as store:
        assert fleeting.process is not None
        fleeting.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineExceeded, match=r"within the deadline of 0\.5 s"):
                store.lookup({"adam": IDS})
        finally:
            fleeting.process.send_signal(signal.SIGCONT)
        store.lookup({"adam": IDS}, version=1)


def test_a_closed_store(redis_url: str) -> None:
    store = prepared(redis_url)
    store.close()
    with pytest.raises(StoreFailed, match="is closed"):
        store.lookup({"adam": IDS})


def test_a_killed_node_of_a_cluster(server_binary: Path, tmp_path: Path) -> None:
    with running_cluster(server_binary, tmp_path) as servers, prepared(servers[0].url) as store:
        servers[2].kill()
        with pytest.raises((Unavailable, StoreFailed), match=servers[2].address.replace(".", r"\.")):
            store.lookup({"adam": IDS})
