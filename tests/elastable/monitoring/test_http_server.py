"""The HTTP side: who is let in, what is bounded, what it says of health."""

import base64
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from elastable.embedding_store.errors import BadInput, StoreFailed
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.wire.access.credentials import Credentials, Role
from elastable.embedding_store.wire.server.connections import LISTENERS, Bound, Bounds, Standing
from elastable.monitoring import http_server
from elastable.monitoring.endpoints import Endpoints
from elastable.monitoring.http_server import ROLE, HttpServer
from elastable.monitoring.metrics import Source, process_source
from elastable.monitoring.page.views import Watched
from tests.certificates import TOKEN, Authority
from tests.elastable.monitoring.http_client import LIMIT_S, get
from tests.raw_http2 import flood, is_open
from tests.waiting import until

HERE = Address("127.0.0.1", 0)


def own_process() -> Source:
    return lambda: process_source("test")


@contextmanager
def served(
    credentials: Credentials = Credentials(),  # noqa: B008 - it is frozen
    not_ready: Callable[[], Mapping[str, str]] = dict,
    sources: Mapping[str, Source] | None = None,
    address: Address = HERE,
    insecure: bool = False,
) -> Iterator[HttpServer]:
    watched = Watched({"process": own_process()} if sources is None else sources, not_ready)
    with closing(Endpoints(watched)) as endpoints, HttpServer(address, endpoints.app, credentials, insecure) as server:
        yield server


def test_metrics_are_what_prometheus_reads() -> None:
    with served() as server:
        answer = get(f"{server.url}metrics")
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/plain; version=")
        found = {family.name: family for family in text_string_to_metric_families(answer.text)}
        (build,) = found["elastable_build_info"].samples
        assert (build.value, build.labels["role"]) == (1.0, "test")
        assert found["process_resident_memory_bytes"].samples[0].value > 1 << 20
        opened = get(f"{server.url}metrics", {"Accept": "application/openmetrics-text; version=1.0.0"})
        assert opened.headers["content-type"].startswith("application/openmetrics-text")
        assert opened.text.endswith("# EOF\n")


def test_a_version_of_a_format_that_is_none_gets_an_answer() -> None:
    with served() as server:
        for version in ("x", "1.x", "1.0.0; escaping=none"):
            answer = get(f"{server.url}metrics", {"Accept": f"application/openmetrics-text; version={version}"})
            assert (answer.status, "elastable_build_info" in answer.text) == (200, True), version


def test_two_servers_of_one_process_share_no_registry() -> None:
    with served() as first, served(sources={}) as second:
        assert "elastable_build_info" in get(f"{first.url}metrics").text
        assert "elastable_build_info" not in get(f"{second.url}metrics").text


def test_a_source_that_fails_hides_no_other() -> None:
    def away() -> Iterator[None]:
        raise StoreFailed("the store is away")
        yield

    with served(sources={"store": away, "process": own_process()}) as server:  # type: ignore[dict-item]
        reply = get(f"{server.url}metrics").text
        assert 'elastable_metrics_source_failed{source="store"} 1.0' in reply
        assert 'elastable_metrics_source_failed{source="process"} 0.0' in reply
        assert "elastable_build_info" in reply


def test_it_lives_while_it_is_not_ready() -> None:
    waiting: dict[str, str] = {"store": "Unavailable: nobody answers"}
    with served(not_ready=lambda: waiting) as server:
        assert get(f"{server.url}healthz").status == 200
        answer = get(f"{server.url}readyz")
        assert (answer.status, "nobody answers" in answer.text) == (503, True)
        waiting.clear()
        assert get(f"{server.url}readyz").status == 200


def test_nothing_is_shown_without_the_token_but_yes_and_no() -> None:
    secret = base64.b64encode(f"anyone:{TOKEN}".encode()).decode()
    wrong = base64.b64encode(b"anyone:guessed").decode()
    with served(Credentials(reader_token=TOKEN), not_ready=lambda: {"store": "a reason"}) as server:
        for path in ("", "metrics", "nothing", "healthz/", "metrics/../metrics"):
            answer = get(f"{server.url}{path}")
            assert (answer.status, "elastable_" in answer.text) == (401, False), path
            assert answer.headers["www-authenticate"].startswith("Basic ")
        probe = get(f"{server.url}readyz")
        assert (probe.status, probe.text) == (503, "not ready\n")
        assert get(f"{server.url}healthz").text == "ok\n"
        for shown in ("Bearer guessed", f"Bearer {TOKEN}x", f"Basic {wrong}", "Basic %%%", TOKEN, "Bearer"):
            assert get(f"{server.url}metrics", {"Authorization": shown}).status == 401, shown
        for shown in (f"Bearer {TOKEN}", f"bearer {TOKEN}", f"Basic {secret}"):
            assert get(f"{server.url}metrics", {"Authorization": shown}).status == 200, shown
        assert "a reason" in get(f"{server.url}readyz", {"Authorization": f"Bearer {TOKEN}"}).text


def test_whoever_shows_no_token_has_no_role() -> None:
    roles = list[Role | None]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        roles.append(scope[ROLE])
        await PlainTextResponse("")(scope, receive, send)

    with HttpServer(HERE, app, Credentials(reader_token=TOKEN)) as server:
        get(f"{server.url}readyz")
        get(f"{server.url}readyz", {"Authorization": f"Bearer {TOKEN}"})
    with HttpServer(HERE, app, Credentials()) as server:
        get(f"{server.url}readyz")
    assert roles == [None, Role.READER, Role.WORKER]


def test_beyond_this_host_it_is_open_only_where_that_is_said() -> None:
    everywhere = Address("0.0.0.0", 0)
    with pytest.raises(BadInput, match="open to everybody"), served(address=everywhere):
        pass
    with (
        pytest.raises(BadInput, match="would travel in plain text"),
        served(Credentials(token=TOKEN), address=everywhere),
    ):
        pass
    with served(address=everywhere, insecure=True) as server:
        assert get(f"{server.url}metrics", {"Host": "any.name"}).status == 200


def test_roles_of_certificates_are_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    mutual = authority.mutual()
    roles = Credentials(mutual.ca, mutual.certificate, mutual.key, certificate_roles={"*": "reader"})
    with pytest.raises(BadInput, match="ELASTABLE_CERTIFICATE_ROLES"), served(roles):
        pass


def test_with_certificates_it_is_https(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    mutual = authority.mutual()
    assert mutual.certificate is not None
    assert mutual.key is not None
    known = ssl.create_default_context(cafile=authority.ca)
    with served(mutual) as server:
        assert server.url.startswith("https://")
        with pytest.raises((ssl.SSLError, ConnectionError)):  # without a certificate of the authority
            get(f"{server.url}healthz", tls=known)
        known.load_cert_chain(mutual.certificate, mutual.key)
        assert get(f"{server.url}metrics", tls=known).status == 401
        assert get(f"{server.url}metrics", {"Authorization": f"Bearer {TOKEN}"}, tls=known).status == 200
        with pytest.raises((ConnectionError, OSError)):
            get(f"{server.url.replace('https', 'http')}healthz")


def test_a_page_of_another_site_is_no_client() -> None:
    with served() as server:
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
            assert get(f"{server.url}metrics", {"Host": host}).status == 421, host
        port = server.address.port
        for host in (f"localhost:{port}", "localhost", f"127.0.0.1:{port}", f"[::1]:{port}"):
            assert get(f"{server.url}metrics", {"Host": host}).status == 200, host


def test_nothing_can_be_changed_and_requests_have_no_body() -> None:
    with served() as server:
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
            assert get(f"{server.url}metrics", method=method).status == 405, method
        assert get(f"{server.url}metrics", body=b"x" * 100).status == 413


def connection(server: HttpServer) -> socket.socket:
    return socket.create_connection((server.address.host, server.address.port), timeout=LIMIT_S)


def read_to_the_end(client: socket.socket) -> bytes:
    """What the server says until it closes the connection."""
    said = b""
    with suppress(ConnectionError):
        while received := client.recv(4096):
            said += received
    return said


def test_a_head_that_is_too_long_is_refused() -> None:
    with served() as server, connection(server) as client:
        with suppress(ConnectionError):
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * (100 << 10))
        assert not read_to_the_end(client).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("said", [b"", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
def test_a_connection_that_asks_nothing_is_closed(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(http_server, "_REQUEST_S", 3.0)
    with served() as server, connection(server) as client:
        client.sendall(said)
        read_to_the_end(client)
        assert get(f"{server.url}healthz").status == 200


def test_further_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {standing: Bound(3, 3) for standing in Standing}
    monkeypatch.setitem(LISTENERS, "HTTP", Bounds(64, few, 3_600.0))
    monkeypatch.setattr(http_server, "_REQUEST_S", 120.0)
    with served() as server, ExitStack() as held:
        clients = [held.enter_context(connection(server)) for _ in range(3)]
        for client in clients:  # each is answered, so each has its place
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
        with connection(server) as further:
            assert read_to_the_end(further) == b""
        assert all(map(is_open, clients))


@pytest.mark.parametrize(
    ("said", "credentials"),
    [(b"", Credentials()), (b"GET /healthz HTTP/1.1\r\n", Credentials(token=TOKEN))],
    ids=["nothing", "half, with a token"],
)
def test_probes_are_answered_whoever_fills_the_port(said: bytes, credentials: Credentials) -> None:
    with served(credentials) as server, flood(str(server.address), said) as ended:
        until(lambda: len(ended) > 200)
        for _ in range(3):
            assert get(f"{server.url}healthz").status == 200


HALF_A_HELLO = bytes.fromhex("1603010200010001fc0303") + bytes(32)
"""The begin of a TLS handshake, whose rest never comes."""


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Credentials, ssl.SSLContext]:
    """A server's, and a client's that knows its authority."""
    authority = Authority(tmp_path_factory.mktemp("tls") / "authority")
    certificate, key = authority.issue("server", "localhost", "127.0.0.1")
    return Credentials(certificate=certificate, key=key), ssl.create_default_context(cafile=authority.ca)


@pytest.mark.parametrize("trickles", [False, True], ids=["silent", "trickles"])
def test_a_tls_handshake_that_never_ends_is_ended(
    monkeypatch: pytest.MonkeyPatch, secured: tuple[Credentials, ssl.SSLContext], trickles: bool
) -> None:
    credentials, tls = secured
    monkeypatch.setitem(LISTENERS, "HTTP", replace(LISTENERS["HTTP"], silent_s=3.0))
    with served(credentials) as server, connection(server) as client:
        client.sendall(HALF_A_HELLO)
        assert get(f"{server.url}healthz", tls=tls).status == 200
        if trickles:
            until(lambda: not says_more(client))
        assert read_to_the_end(client) == b""
        assert get(f"{server.url}healthz", tls=tls).status == 200


def says_more(client: socket.socket) -> bool:
    with suppress(OSError):
        client.sendall(b"x")
        return is_open(client)
    return False


def test_probes_are_answered_whatever_handshakes_never_end(secured: tuple[Credentials, ssl.SSLContext]) -> None:
    credentials, tls = secured
    with served(credentials) as server, flood(str(server.address), HALF_A_HELLO) as ended:
        until(lambda: len(ended) > 200)
        for _ in range(3):
            assert get(f"{server.url}healthz", tls=tls).status == 200


def test_an_address_in_use_is_refused_by_name() -> None:
    with served() as server, pytest.raises(BadInput, match="Address already in use"), served(address=server.address):
        pass


def test_answers_may_be_kept_by_nobody_and_shown_in_no_frame() -> None:
    with served(Credentials(token=TOKEN)) as server:
        for path in ("metrics", "healthz"):
            headers = get(f"{server.url}{path}").headers
            assert headers["cache-control"] == "no-store"
            assert headers["x-frame-options"] == "DENY"
            assert headers["x-content-type-options"] == "nosniff"
            assert "server" not in headers


def test_closing_twice_is_harmless_and_frees_the_port() -> None:
    with served() as server:
        server.close()
        server.close()
        with socket.create_server((server.address.host, server.address.port)) as again:
            assert again.fileno() > 0
