"""Connections are counted at every port: who says nothing, or opens too many, keeps nobody else out."""

import ast
import os
import socket
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from elastable.embedding_store import Credentials, MemoryStore, RemoteSource
from elastable.embedding_store.wire.access.credentials import Role
from elastable.embedding_store.wire.server import grpc_server
from elastable.embedding_store.wire.server.call_room import CallLimits
from elastable.embedding_store.wire.server.connections import (
    LISTENERS,
    Bound,
    Bounds,
    CountedConnection,
    CountedPort,
    Standing,
    beyond,
)
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.service.store_service import store_service
from tests.certificates import TOKEN, Authority
from tests.contracts.store_samples import create_tables, fixed, int64
from tests.raw_http2 import begun, call, connected, flood, half_a_call, is_open, ping, until_ended
from tests.waiting import until

WAIT_S = 180.0
STATUS = "/elastable.embedding_store.v1.Store/GetStoreStatus"
HEALTH = "/grpc.health.v1.Health/Check"
MANY = 600
ROOT = Path(__file__).parents[3]


def bounds(silent: int = 64, caller: int = 64, known: int = 64, silent_s: float = 3_600.0, cap: int = 4_096) -> Bounds:
    numbers = zip(Standing, (silent, caller, known), strict=True)
    return Bounds(cap, {standing: Bound(number, number) for standing, number in numbers}, silent_s)


@contextmanager
def served(
    monkeypatch: pytest.MonkeyPatch,
    bounded: Bounds,
    credentials: Credentials | None = None,
    anonymous: Role | None = None,
) -> Iterator[GrpcServer]:
    monkeypatch.setitem(LISTENERS, "gRPC", bounded)
    with (
        create_tables(MemoryStore(1), fixed()) as store,
        GrpcServer("127.0.0.1:0", [store_service(store)], credentials=credentials, anonymous=anonymous) as server,
    ):
        yield server


def healthy(address: str) -> bool:
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        reply = check(health_pb2.HealthCheckRequest(), timeout=WAIT_S, wait_for_ready=True)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def answered(address: str) -> bool:
    """Whether it is healthy; one of few places may be another's before the question was asked."""
    try:
        return healthy(address)
    except grpc.RpcError:
        return False


@pytest.mark.parametrize("said", [b"", begun() + call(1, STATUS)], ids=["nothing", "all"])
def test_a_worker_with_a_token_joins_and_health_is_answered_whoever_fills_the_port(
    monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    credentials = Credentials(token=TOKEN)
    with (
        served(monkeypatch, bounds(silent=32, caller=48, known=64, cap=512), credentials, Role.READER) as server,
        RemoteSource(server.address, WAIT_S, credentials=credentials) as before,
        flood(server.address, said, MANY) as ended,
    ):
        before.lookup({"cities": int64(1)})
        until(lambda: len(ended) > MANY)
        for _ in range(3):
            with RemoteSource(server.address, WAIT_S, credentials=credentials) as source:
                source.lookup({"cities": int64(1)})
            until(lambda: answered(server.address), WAIT_S)


def ended_of(address: str, said: Mapping[str, bytes]) -> None:
    clients = {name: connected(address, words) for name, words in said.items()}
    for client in clients.values():
        until_ended(client)
        client.close()


def test_connections_that_ask_for_nothing_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        served(monkeypatch, bounds(silent_s=1.0)) as server,
        connected(server.address, begun() + call(1, STATUS)) as asking,
    ):
        with connected(server.address, begun()) as pinging:
            with suppress(OSError):  # at the end of the connection
                for _ in range(10_000):
                    pinging.sendall(ping())
                    time.sleep(0.01)
            until_ended(pinging)
        ended_of(
            server.address, {"nothing": b"", "hello": begun(), "half": begun() + half_a_call(1), "wrong": b"GET / HTTP"}
        )
        assert is_open(asking)


def test_half_a_handshake_of_tls_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path / "ours").issue("server", "localhost")
    hello = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(*hello, server_hostname="localhost").do_handshake()
    first = hello[1].read()
    with served(monkeypatch, bounds(silent_s=1.0), Credentials(None, certificate, key)) as server:
        ended_of(server.address, {"nothing": b"", "half": first[:50], "all": first})
    # gRPC's own limit, for whom the thread that counts does not see yet
    options = [(name, 1_000 if "handshake" in name else value) for name, value in grpc_server._OPTIONS]
    monkeypatch.setattr(grpc_server, "_OPTIONS", options)
    with served(monkeypatch, bounds(), Credentials(None, certificate, key)) as server:
        ended_of(server.address, {"nothing": b"", "half": first[:50], "all": first})


def test_a_connection_without_calls_is_ended_whatever_it_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [(name, 1_000 if "idle" in name else value) for name, value in grpc_server._OPTIONS]
    monkeypatch.setattr(grpc_server, "_OPTIONS", options)
    with served(monkeypatch, bounds()) as server, connected(server.address, begun() + call(1, STATUS)) as client:
        with suppress(OSError):
            for _ in range(10_000):
                client.sendall(ping())
                time.sleep(0.01)
        until_ended(client)


def test_clients_that_are_answered_stay_and_further_ones_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(monkeypatch, bounds(known=8)) as server, ExitStack() as held:

        def asking() -> socket.socket:
            return held.enter_context(closing(connected(server.address, begun() + call(1, STATUS))))

        first = [asking() for _ in range(8)]
        for client in first:
            assert client.recv(1)
        until(lambda: server.connections.counted[Standing.KNOWN] == 8)
        until_ended(asking())
        assert all(map(is_open, first))


@pytest.mark.process
def test_a_process_with_few_descriptors_keeps_some_for_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "elastable", "serve", "--listen", "127.0.0.1:0", "--store", "memory"]
    few = ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh", *command]
    with subprocess.Popen(few, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[3].rstrip(",")
            with flood(address, begun(), 200):
                until(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) > 60)
                for _ in range(3):
                    assert len(os.listdir(f"/proc/{server.pid}/fd")) < 200
                    until(lambda: answered(address), WAIT_S)
        finally:
            server.terminate()


# Which connections end, of any


def connection(port: CountedPort, host: int, standing: Standing, since: int) -> CountedConnection:
    return CountedConnection(0, 0, port, (f"10.0.0.{host}", since), since, since, standing)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from(Standing)), max_size=60),
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=3, max_size=3),
)
def test_what_stays_is_within_the_bounds_and_nobody_ends_in_vain(
    there: list[tuple[int, Standing]], numbers: list[tuple[int, int]]
) -> None:
    of = {standing: Bound(*number) for standing, number in zip(Standing, numbers, strict=True)}
    port = CountedPort("gRPC")
    every = [connection(port, host, standing, since) for since, (host, standing) in enumerate(there)]
    ended = beyond(every, Bounds(100, of), len(every) + 1.0)
    assert len(set(ended)) == len(ended)
    stays = [one for one in every if one not in ended]
    for standing, bound in of.items():
        counted = Counter(one.peer[0] for one in stays if one.standing <= standing)
        assert counted.total() <= bound.in_all
        assert max(counted.values(), default=0) <= bound.of_an_address
    if all(bound.in_all >= len(every) and bound.of_an_address >= len(every) for bound in of.values()):
        assert not ended


def test_silent_ones_make_way_for_who_comes_and_known_ones_for_nobody() -> None:
    port, of = CountedPort("gRPC"), bounds(silent=4, caller=4, known=4)
    silent = [connection(port, 1, Standing.SILENT, since) for since in range(4)]
    known = [connection(port, 2, Standing.KNOWN, since) for since in range(3)]
    assert beyond([*silent, *known], of, 4.0) == silent[:3]
    assert (
        beyond([*known, connection(port, 3, Standing.KNOWN, 3), connection(port, 3, Standing.KNOWN, 4)], of, 4.0)[
            0
        ].since
        == 4
    )


@pytest.mark.parametrize("kind", LISTENERS)
@pytest.mark.parametrize("descriptors", [256, 1_024, 20_000, 1 << 20])
def test_bounds_leave_descriptors_and_room_to_come(kind: str, descriptors: int) -> None:
    fitting = LISTENERS[kind].within(descriptors)
    assert fitting.cap <= max(descriptors * 3 // 8, 8)
    assert fitting.cap > max(bound.in_all for bound in fitting.of.values())
    for lower, higher in zip(Standing, list(Standing)[1:], strict=False):
        assert fitting.of[lower].in_all <= fitting.of[higher].in_all


def test_the_page_has_the_bounds() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    by_standing = [[LISTENERS[kind].of[standing] for kind in ("gRPC", "HTTP")] for standing in reversed(Standing)]
    rows = ["in all; of one address", "of those without a token or a certificate, where the server knows one"]
    for row, (grpc_bound, http_bound) in zip(rows, by_standing, strict=False):
        if row == rows[1]:  # over HTTP whoever shows no token stays a stranger
            http_bound = LISTENERS["HTTP"].of[Standing.SILENT]
        cells = (f"{bound.in_all:,}; {bound.of_an_address:,}" for bound in (grpc_bound, http_bound))
        assert f"| {row} | {' | '.join(cells)} |" in page
    assert f"| silent ones end after | {LISTENERS['gRPC'].silent_s:g} s |" in page
    assert f"| streams of one connection | {CallLimits().streams} |" in page


# Every listener is in the table


LISTENING = {
    "elastable/monitoring/http_server.py": "HTTP",
    "embedding_store/wire/server/grpc_server.py": "gRPC",
    # A socket of this host alone, with limits of its own: the users of one machine.
    "embedding_store/wire/shared/shared_store.py": None,
    # Members of a replica group find each other, for as long as it takes.
    "elastable/launch/launch.py": None,
    "replicas/groups/peer_monitor.py": None,
}
"""Modules that listen -> their kind in `LISTENERS`; None: their clients are no clients of a server."""
NAMES = {
    *("listen", "create_server", "add_insecure_port", "add_secure_port", "start_server", "start_unix_server"),
    *("create_unix_server", "start_http_server", "start_wsgi_server", "HTTPServer", "TCPServer", "serve_forever"),
}


def listens(path: Path) -> bool:
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return any((each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "")) in NAMES for each in calls)


def test_whatever_listens_is_in_the_table_and_counts() -> None:
    packages = ("embedding_store", "master", "worker", "replicas", "elastable")
    found = {
        str(path.relative_to(ROOT)): path
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        if not any(parent.is_symlink() for parent in path.parents)
        if listens(path)
    }
    assert set(found) == set(LISTENING)
    assert {kind for kind in LISTENING.values() if kind} == set(LISTENERS)
    for module, kind in LISTENING.items():
        if kind is not None:
            text = found[module].read_text()
            assert f'"{kind}"' in text, f"{module} does not say that it is the listener {kind!r}"
            assert ".begin(" in text, f"{module} does not have its port counted"
