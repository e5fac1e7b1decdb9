"""`elastable kg serve`: batches over real HTTP, and what it refuses."""

from __future__ import annotations

import http.client
import json
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastable.commands.knowledge_graphs import query_server
from elastable.commands.knowledge_graphs.query_server import LONGEST_BODY, QueryServer
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.wire.access.credentials import Credentials
from elastable.replicas.knowledge_graphs.trained.link_predictor import LinkPredictor, Query
from elastable.replicas.knowledge_graphs.trained.neighbors import nearest_neighbors
from elastable.replicas.knowledge_graphs.trained.query_service import QueryService
from tests.certificates import TOKEN, Authority
from tests.elastable.processes import elastable
from tests.untyped import Parsed

LOCAL = Address("127.0.0.1", 0)


@pytest.fixture(scope="module")
def predictor(run: Path) -> LinkPredictor:
    return LinkPredictor(run)


@contextmanager
def _serving(predictor: LinkPredictor, credentials: Credentials | None = None) -> Iterator[Address]:
    with QueryServer(QueryService(predictor), LOCAL, credentials or Credentials()) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.address
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def address(predictor: LinkPredictor) -> Iterator[Address]:
    with _serving(predictor) as found:
        yield found


def _ask(address: Address, path: str, body: object = None, **headers: str) -> tuple[int, Parsed]:
    connection = http.client.HTTPConnection(address.host, address.port, timeout=120)
    try:
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, content, headers)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


def test_a_batch_is_answered_as_the_library_answers_it(address: Address, predictor: LinkPredictor) -> None:
    queries: list[Parsed] = [{"head": f"person-{k}", "relation": "knows"} for k in range(9)]
    queries += [{"relation": "lives in", "tail": "place-2"}, {"relation": "near", "head": "place-1", "tail": None}]
    status, told = _ask(address, "/predict", {"queries": queries, "top": 3, "new": True})
    assert status == 200
    asked = [Query(each["relation"], each.get("head"), each.get("tail")) for each in queries]
    for mine, theirs in zip(told["answers"], predictor.answer(asked, k=3, new=True), strict=True):
        assert mine == [{"entity": each.entity, "score": each.score} for each in theirs]
    status, told = _ask(address, "/predict", {"queries": queries[:1], "among": ["place-1", "person-5"]})
    assert {each["entity"] for each in told["answers"][0]} == {"place-1", "person-5"}


def test_triples_are_scored_and_neighbours_found(address: Address, predictor: LinkPredictor) -> None:
    triples, trained = [["person-1", "knows", "person-2"], ["place-1", "near", "place-2"]], predictor.trained
    ids = [[trained.entities.id_of(h), trained.relations.id_of(r), trained.entities.id_of(t)] for h, r, t in triples]
    for side in ("head", "tail"):
        status, told = _ask(address, "/score", {"triples": triples, "side": side})
        assert (status, told["scores"]) == (200, trained.triple_scores(ids, side).tolist())
    status, told = _ask(address, "/neighbors", {"entities": ["person-1", "place-1"], "top": 2, "measure": "dot"})
    near = nearest_neighbors(trained, [trained.entities.id_of(name) for name in ("person-1", "place-1")], 2, "dot")
    assert [[each["entity"] for each in row] for row in told["neighbors"]] == [
        [trained.entities[each] for each in row] for row in near.entities.tolist()
    ]
    assert _ask(address, "/")[1]["model"] == "ComplEx"


def test_many_clients_at_once_get_their_own_answers(address: Address) -> None:
    def ask(k: int) -> object:
        return _ask(address, "/predict", {"queries": [{"head": f"person-{k % 14}", "relation": "knows"}], "top": 4})

    alone = [ask(k) for k in range(14)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, range(56)))
    assert together == alone * 4


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("/predict", b"{", 400, "not JSON"),
        ("/predict", b"[" * 100_000, 400, "not JSON"),
        ("/predict", b"\xff\xfe", 400, "not JSON"),
        ("/predict", [], 400, "JSON object"),
        ("/predict", {}, 400, "queries must be a list"),
        ("/predict", {"queries": []}, 400, "1 to 10000"),
        ("/predict", {"queries": [3]}, 400, "queries[0]"),
        ("/predict", {"queries": [{"head": "person-1"}]}, 400, "queries[0]"),
        ("/predict", {"queries": [{"head": 3, "relation": "knows"}]}, 400, "queries[0].head must be a name"),
        ("/predict", {"queries": [{"head": "persn-1", "relation": "knows"}]}, 400, "person-1"),
        ("/predict", {"queries": [{"head": "person-1", "relation": "knows", "tail": "person-2"}]}, 400, "give a head"),
        ("/predict", {"queries": [{"head": "person-1", "relation": "knows", "to": "x"}]}, 400, "queries[0]"),
        ("/predict", {"queries": [{"head": "person-1", "relation": "knows"}], "top": 0}, 400, "top must be"),
        ("/predict", {"queries": [{"head": "person-1", "relation": "knows"}], "top": True}, 400, "top must be"),
        ("/predict", {"queries": [{"head": "person-1", "relation": "knows"}] * 2, "top": 10**6}, 400, "ask in parts"),
        ("/predict", {"queries": [{"head": "person-1", "relation": "knows"}], "tops": 3}, 400, "no 'tops'"),
        ("/predict", {"queries": [{"head": "person-1", "relation": "knows"}], "new": 1}, 400, "new must be"),
        ("/predict", {"queries": [{"head": "person-1", "relation": "knows"}], "among": [1]}, 400, "among[0]"),
        ("/score", {"triples": [["a", "b"]]}, 400, "[head, relation, tail]"),
        ("/score", {"triples": [["person-1", "knows", "person-2"]], "side": "x"}, 400, "side must be"),
        ("/neighbors", {"entities": ["person-1"], "measure": ["x"]}, 400, "measure must be"),
        ("/elsewhere", {}, 404, "/predict"),
        ("/elsewhere", None, 404, "POST to /neighbors"),
    ],
)
def test_bad_requests_are_refused_in_words(address: Address, path: str, body: object, status: int, told: str) -> None:
    found = _ask(address, path, body)
    assert found[0] == status
    assert told in found[1]["error"]


def test_bodies_without_a_length_or_of_too_many_bytes_are_not_read(address: Address) -> None:
    for length, status in ((str(LONGEST_BODY + 1), 413), ("x", 411), ("-1", 411), ("9" * 40, 411)):
        with socket.create_connection((address.host, address.port), 60) as raw:
            raw.sendall(f"POST /predict HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode())
            assert raw.makefile("rb").readline().split()[1] == str(status).encode()


def test_a_page_of_another_site_is_no_client(address: Address) -> None:
    for host in ("evil.example", f"evil.example:{address.port}", "127.0.0.1.evil.example", ""):
        assert _ask(address, "/", Host=host)[0] == 421, host
        assert _ask(address, "/predict", {"queries": []}, Host=host)[0] == 421, host
    for host in (f"localhost:{address.port}", "127.0.0.1", f"[::1]:{address.port}"):
        assert _ask(address, "/", Host=host)[0] == 200, host


@pytest.mark.parametrize(
    "head", ["GET / HTTP/1.1\r\nContent-Length: {}", "POST /predict HTTP/1.1\r\nContent-Length: {0}"]
)
def test_no_body_is_taken_for_another_request(address: Address, head: str) -> None:
    hidden = b"GET / HTTP/1.1\r\n\r\n"
    chunked = "" if head.startswith("GET") else "\r\nTransfer-Encoding: chunked"
    with socket.create_connection((address.host, address.port), 60) as raw:
        raw.sendall(head.format(len(hidden) if not chunked else 0).encode() + chunked.encode() + b"\r\n\r\n" + hidden)
        told = raw.makefile("rb").read()
    assert told.count(b"HTTP/1.1 ") == 1
    assert told.split()[1] in (b"411", b"413")


def test_a_request_is_no_command_to_the_terminal_that_shows_the_log(
    address: Address, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "elastable.commands.knowledge_graphs.query_server")
    with socket.create_connection((address.host, address.port), 60) as raw:
        raw.sendall(b"GET /\x1b[2J\x9bforged HTTP/1.1\r\n\r\n")
        assert raw.makefile("rb").readline().split()[1] == b"404"
    (line,) = [record.getMessage() for record in caplog.records if "forged" in record.getMessage()]
    assert line.isprintable()
    assert r"/\x1b[2J\x9bforged" in line


def test_further_connections_are_closed(predictor: LinkPredictor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_server, "MOST_CONNECTIONS", 2)
    with _serving(predictor) as address:
        held = [socket.create_connection((address.host, address.port), 60) for _ in range(2)]
        for each in held:  # both are being served
            each.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert each.makefile("rb").readline().startswith(b"HTTP/1.1 200")
        with socket.create_connection((address.host, address.port), 60) as third:
            assert third.recv(1) == b""
        for each in held:
            each.close()


def test_tokens_are_asked_for(predictor: LinkPredictor) -> None:
    with _serving(predictor, Credentials(token=TOKEN, reader_token="another")) as address:
        for headers in ({}, {"Authorization": f"Basic {TOKEN}"}, {"Authorization": "Bearer nope"}):
            assert _ask(address, "/", **headers)[0] == 401
            assert _ask(address, "/score", {"triples": []}, **headers)[0] == 401
        for token in (TOKEN, "another"):
            assert _ask(address, "/", Authorization=f"Bearer {token}")[0] == 200


def test_tls_with_certificates_of_both(predictor: LinkPredictor, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    with _serving(predictor, authority.mutual()) as address:
        context = ssl.create_default_context(cafile=authority.ca)
        context.load_cert_chain(*authority.issue("client", "client"))
        connection = http.client.HTTPSConnection("127.0.0.1", address.port, timeout=120, context=context)
        connection.request("GET", "/", headers={"Authorization": f"Bearer {TOKEN}"})
        assert connection.getresponse().status == 200
        connection.close()
        with pytest.raises(OSError, match=r".*"):
            _ask(address, "/")  # plain text
        assert _tls_without_certificate(authority, address) is None


def _tls_without_certificate(authority: Authority, address: Address) -> bytes | None:
    context = ssl.create_default_context(cafile=authority.ca)
    try:
        with (
            socket.create_connection((address.host, address.port), 60) as raw,
            context.wrap_socket(raw, server_hostname="127.0.0.1") as tls,
        ):
            tls.sendall(b"GET / HTTP/1.1\r\n\r\n")
            return tls.recv(1) or None
    except OSError:
        return None


def test_an_open_address_and_certificate_roles_are_refused(predictor: LinkPredictor, tmp_path: Path) -> None:
    service = QueryService(predictor)
    with pytest.raises(BadInput, match="--insecure"):
        QueryServer(service, Address("0.0.0.0", 0), Credentials())
    mutual = Authority(tmp_path / "ca").mutual()
    roles = Credentials(mutual.ca, mutual.certificate, mutual.key, certificate_roles={"*": "reader"})
    with pytest.raises(BadInput, match="CERTIFICATE_ROLES"):
        QueryServer(service, LOCAL, roles)
    with _serving(predictor) as address, pytest.raises(BadInput, match="cannot be listened at"):
        QueryServer(service, address, Credentials())


def test_the_command_serves_until_it_is_asked_to_end(run: Path, tmp_path: Path) -> None:
    with elastable(tmp_path, "kg", "serve", run, "--listen", "127.0.0.1:0") as server:
        address = Address.parse(server.address())
        status, told = _ask(address, "/predict", {"queries": [{"head": "person-1", "relation": "knows"}]})
        assert (status, len(told["answers"][0])) == (200, 10)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
