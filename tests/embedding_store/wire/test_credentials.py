"""Who may talk with whom: TLS, certificates of both ends, tokens; and what cannot be is refused by name."""

import logging
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from elastable.embedding_store import MemoryStore, RemoteSource
from elastable.embedding_store.errors import BadInput, Unauthenticated, Unavailable
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.wire.access.credentials import ENVIRONMENT, Credentials, Role
from elastable.embedding_store.wire.channels.server_connection import ServerConnection
from elastable.embedding_store.wire.messages.store_messages import STORE_SERVICE
from elastable.embedding_store.wire.server.grpc_server import GrpcServer, Service
from tests.certificates import TOKEN, Authority
from tests.embedding_store.serving import client_service

LOOPBACK = Address("127.0.0.1", 50051)
ELSEWHERE = Address("192.0.2.1", 50051)
FILES = [name for name in ENVIRONMENT if name not in ("ELASTABLE_CERTIFICATE_ROLES", "ELASTABLE_TLS_NAME")]
TOKENS = (TOKEN, f"{TOKEN}-of-workers", f"{TOKEN}-of-readers")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "theirs")


@pytest.fixture
def files(ours: Authority, tmp_path: Path) -> dict[str, Path]:
    """A file for every variable that names one, all of them right; a test spoils some."""
    certificate, key = ours.issue("here", "localhost")
    made = {variable: tmp_path / variable.removeprefix("ELASTABLE_") for variable in FILES}
    for source, target in zip((ours.ca, certificate, key), made.values(), strict=False):
        shutil.copy(source, target)
    for variable, token in zip(FILES[3:], TOKENS, strict=True):
        made[variable].write_text(f"{token}\n")
    return made


def environment(files: dict[str, Path], *names: str) -> dict[str, str]:
    return {f"ELASTABLE_{name}": str(files[f"ELASTABLE_{name}"]) for name in names}


# -- what the environment says


def test_every_variable_is_read(files: dict[str, Path]) -> None:
    ca, certificate, key, *_ = files.values()
    roles = {"ELASTABLE_CERTIFICATE_ROLES": "ops.example=administrator, trainer = worker,*=reader"}
    others = {**roles, "ELASTABLE_TLS_NAME": "elastable"}
    found = Credentials.from_environment({name: str(file) for name, file in files.items()} | others)
    named = {"ops.example": "administrator", "trainer": "worker", "*": "reader"}
    assert found == Credentials(str(ca), str(certificate), str(key), *TOKENS, named, "elastable")
    assert found.tokens == dict(zip(TOKENS, reversed(Role), strict=True))


@pytest.mark.parametrize("given", [("TLS_KEY",), ("TLS_CERT",), ("TLS_CA", "TLS_KEY")])
def test_certificate_and_key_come_together(files: dict[str, Path], given: tuple[str, ...]) -> None:
    with pytest.raises(BadInput, match=r"ELASTABLE_TLS_(CERT|KEY)\) is .*_TLS_(KEY|CERT)\) is not set") as caught:
        Credentials.from_environment(environment(files, *given))
    assert str(files[f"ELASTABLE_{given[-1]}"]) in str(caught.value)


NO_PEM = (b"", b"\x30\x82\x01\x0a\xff", b"-----BEGIN CERTIFICATE-----\nnothing\n")


@pytest.mark.parametrize(
    ("name", "text"), [*((name, None) for name in FILES), *((name, text) for name in FILES[:3] for text in NO_PEM)]
)
def test_a_file_that_is_missing_or_not_pem_is_named(files: dict[str, Path], name: str, text: bytes | None) -> None:
    files[name].unlink() if text is None else files[name].write_bytes(text)
    with pytest.raises(BadInput, match=f"{name}.*No such file" if text is None else name) as caught:
        Credentials.from_environment({variable: str(file) for variable, file in files.items()})
    assert str(files[name]) in str(caught.value)


def test_files_of_each_others_kind_are_named(files: dict[str, Path]) -> None:
    ca, certificate, key, *_ = files.values()
    with pytest.raises(BadInput, match=r"key \(ELASTABLE_TLS_KEY\).*must be a private key in PEM"):
        Credentials(ca, certificate, certificate)
    with pytest.raises(BadInput, match=r"certificate \(ELASTABLE_TLS_CERT\).*must be a certificate in PEM"):
        Credentials(ca, key, key)
    with pytest.raises(BadInput, match=r"ca \(ELASTABLE_TLS_CA\).*must be a certificate in PEM"):
        Credentials(key, certificate, key)


def test_the_key_of_another_certificate_is_named(ours: Authority, files: dict[str, Path]) -> None:
    other = ours.issue("other", "localhost")[1]
    with pytest.raises(BadInput, match="is not the key of") as caught:
        Credentials(certificate=files["ELASTABLE_TLS_CERT"], key=other)
    assert str(other) in str(caught.value)


def test_an_encrypted_key_is_refused_and_nobody_is_asked(files: dict[str, Path]) -> None:
    key = files["ELASTABLE_TLS_KEY"]
    key.write_text(key.read_text().replace("-----\n", "-----\nProc-Type: 4,ENCRYPTED\n", 1))
    with pytest.raises(BadInput, match=r"ELASTABLE_TLS_KEY.* is encrypted"):
        Credentials(certificate=files["ELASTABLE_TLS_CERT"], key=key)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("two words", "9 characters"),
        ("grün", "cannot be sent"),
        ("a" * 4097, "4,097"),
    ],
)
def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(files: dict[str, Path], text: str, message: str) -> None:
    for variable in FILES[3:]:
        file = files[variable]
        file.write_text(text)
        with pytest.raises(BadInput, match=message) as caught:
            Credentials.from_environment({variable: str(file)})
        assert str(file) in str(caught.value)
        assert variable in str(caught.value)
    assert not text.strip() or text not in str(caught.value)


def test_no_repr_shows_the_token() -> None:
    shown = repr(Credentials(None, None, None, *TOKENS))
    assert not any(token in shown for token in TOKENS)


def test_each_role_has_a_token_of_its_own() -> None:
    with pytest.raises(BadInput, match=r"ELASTABLE_TOKEN_FILE.*READER_TOKEN_FILE.* are one secret") as caught:
        Credentials(token=TOKEN, reader_token=TOKEN)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("text", ["ops", "ops=chief", "=reader", "a=reader,a=worker"])
def test_roles_of_certificates_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="ELASTABLE_CERTIFICATE_ROLES"):
        Credentials.from_environment({"ELASTABLE_CERTIFICATE_ROLES": text})


def test_roles_of_certificates_need_a_server_that_asks_for_certificates(ours: Authority) -> None:
    certificate, key = ours.issue("here", "localhost")
    for credentials in (
        Credentials(certificate_roles={"*": "reader"}),
        Credentials(certificate=certificate, key=key, certificate_roles={"*": "reader"}),
    ):
        with pytest.raises(BadInput, match=r"ELASTABLE_CERTIFICATE_ROLES.* asks clients for no certificate"):
            credentials.for_server(LOOPBACK)


def test_workers_that_a_command_starts_find_their_token_in_the_environment() -> None:
    assert Credentials.from_environment({"ELASTABLE_WORKER_TOKEN": "given"}).tokens == {"given": Role.WORKER}


# -- what would not be safe


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_a_server_that_is_open_to_everybody_is_refused_unless_that_is_said(host: str) -> None:
    with pytest.raises(BadInput, match=r"would be open to everybody who reaches it.*--insecure"):
        GrpcServer(f"{host}:0", [], credentials=Credentials())
    if host == "0.0.0.0":
        GrpcServer(f"{host}:0", [], credentials=Credentials(), insecure=True).stop(0)
    GrpcServer("127.0.0.1:0", [], credentials=Credentials()).stop(0)


@pytest.mark.parametrize("host", ["192.0.2.1", "0.0.0.0", "::", "example.org", "localhost.example.org"])
def test_a_token_does_not_leave_its_host_in_plain_text(host: str) -> None:
    credentials = Credentials(token=TOKEN)
    for secured in (credentials.for_client, credentials.for_server):
        with pytest.raises(BadInput, match=r"ELASTABLE_TOKEN_FILE.* plain text.*ELASTABLE_TLS_CA") as caught:
            secured(Address(host, 1))
        assert TOKEN not in str(caught.value)


def test_servers_and_connections_refuse_it_before_they_begin() -> None:
    with pytest.raises(BadInput, match="plain text"):
        GrpcServer("0.0.0.0:0", [], credentials=Credentials(token=TOKEN))
    with pytest.raises(BadInput, match="plain text"):
        ServerConnection("127.0.0.1:1,192.0.2.1:1", credentials=Credentials(token=TOKEN))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_within_a_host_a_token_may_go_in_plain_text(host: str) -> None:
    assert Credentials(token=TOKEN).for_client(Address(host, 1)) is None
    assert Credentials(token=TOKEN).for_server(Address(host, 1)) is None
    assert Credentials().for_client(ELSEWHERE) is None
    assert Credentials().for_server(ELSEWHERE, insecure=True) is None


def test_a_client_without_an_authority_and_a_server_without_a_certificate_are_refused(ours: Authority) -> None:
    certificate, key = ours.issue("here", "localhost")
    with pytest.raises(BadInput, match=r"ELASTABLE_TLS_CA\) is not set: a client cannot verify"):
        Credentials(certificate=certificate, key=key).for_client(LOOPBACK)
    with pytest.raises(BadInput, match=r"ELASTABLE_TLS_CERT\) is not set: a server"):
        Credentials(ours.ca).for_server(LOOPBACK)


# -- who gets through


class Echo:
    """A service with a call of every shape; counts the calls that reach it, and keeps what came with the last."""

    def __init__(self) -> None:
        self.calls = 0
        self.metadata: dict[str, str | bytes] = {}

    def joined(self, said: bytes | Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        self.calls += 1
        self.metadata = dict(context.invocation_metadata())
        return said if isinstance(said, bytes) else b"".join(said)

    def each(self, said: bytes | Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield self.joined(said, context)

    def service(self) -> Service:
        handlers = {
            shape: getattr(grpc, f"{shape}_rpc_method_handler")(self.each if shape.endswith("stream") else self.joined)
            for shape in SHAPES
        }
        return Service(STORE_SERVICE, handlers)


SHAPES = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def echoed(connection: ServerConnection, shape: str) -> bytes:
    call = getattr(connection.channel, shape)(f"/{STORE_SERVICE}/{shape}", None, None)

    def attempt(timeout: float) -> bytes:
        reply = call(iter([b"said"]) if shape.startswith("stream") else b"said", timeout=timeout)
        return b"".join(reply) if shape.endswith("stream") else reply

    return connection.call(attempt)


def server_of(credentials: Credentials, echo: Echo | None = None) -> GrpcServer:
    # Its calls are in no table of roles, and so are for administrators.
    anonymous = None if credentials.tokens else Role.ADMINISTRATOR
    return GrpcServer("127.0.0.1:0", [(echo or Echo()).service()], credentials=credentials, anonymous=anonymous)


def ask(address: str, credentials: Credentials, shape: str = "unary_unary", deadline_s: float = 60.0) -> bytes:
    with ServerConnection(address, deadline_s, credentials) as connection:
        return echoed(connection, shape)


def refused_at_once(address: str, credentials: Credentials) -> str:
    """What a call is refused with, by one attempt and no repeat."""
    attempts = list[float]()
    with ServerConnection(address, 60, credentials) as connection:
        call = connection.channel.unary_unary(f"/{STORE_SERVICE}/unary_unary", None, None)
        with pytest.raises(Unauthenticated) as caught:
            connection.call(lambda timeout: (attempts.append(timeout), call(b"", timeout=timeout)))  # type: ignore[func-returns-value]
    assert len(attempts) == 1
    assert address in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_call_gets_through_with_certificates_and_token(ours: Authority, shape: str) -> None:
    credentials = ours.mutual()
    with server_of(credentials) as server:
        assert ask(server.address, credentials, shape) == b"said"
        others = f"{server.address},localhost:{server.address.rpartition(':')[2]}"
        assert ask(others, credentials, shape) == b"said"


@pytest.mark.parametrize(
    ("shape", "shown"), list(zip(SHAPES, [None, "another-secret-of-somebody", TOKEN[:-1], TOKEN.upper()], strict=True))
)
def test_no_shape_of_call_gets_through_without_the_token(shape: str, shown: str | None) -> None:
    echo = Echo()
    with server_of(Credentials(token=TOKEN), echo) as server:
        assert ask(server.address, Credentials(token=TOKEN), shape) == b"said"
        with pytest.raises(Unauthenticated, match=f"{server.address} .*ELASTABLE_TOKEN_FILE") as caught:
            ask(server.address, Credentials(token=shown), shape)
        assert echo.calls == 1
    assert TOKEN not in str(caught.value)
    assert shown is None or shown not in str(caught.value)


@pytest.mark.parametrize(
    ("shown", "taken"),
    [
        *(([f"{scheme} {TOKEN}"], True) for scheme in ("bearer", "BEARER")),
        *(([value], False) for value in ("Bearer", "Bearer ", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN} ")),
        ([], False),
        ([f"Bearer {TOKEN}"] * 2, False),
    ],
)
def test_one_bearer_token_is_taken_and_nothing_else(shown: list[str], taken: bool) -> None:
    with server_of(Credentials(token=TOKEN)) as server, grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary(f"/{STORE_SERVICE}/unary_unary", None, None).future(
            b"said", timeout=60, metadata=tuple(("authorization", value) for value in shown)
        )
        assert call.code() is (grpc.StatusCode.OK if taken else grpc.StatusCode.UNAUTHENTICATED)


@pytest.mark.parametrize(
    "method",
    [
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/elastable.master.v1.Master/Missing",
    ],
)
def test_nothing_but_health_goes_without_a_token(method: str) -> None:
    with server_of(Credentials(token=TOKEN)) as server, grpc.insecure_channel(server.address) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            next(channel.stream_stream(method, None, None)(iter([b""]), timeout=60))  # type: ignore[call-overload]
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_reflection_is_served_only_where_nothing_secures_the_server(ours: Authority) -> None:
    certificate, key = ours.issue("server", "localhost", "127.0.0.1")
    tls = Credentials(certificate=certificate, key=key)
    administrator = Credentials(token=TOKEN)
    readers = Credentials(reader_token=TOKEN)
    for served_by, shown in ((administrator, administrator), (readers, readers), (tls, Credentials(ours.ca))):
        with server_of(served_by) as server:
            assert reflection_of(server.address, shown) is grpc.StatusCode.UNIMPLEMENTED
    with server_of(Credentials()) as server:
        assert reflection_of(server.address, Credentials()) is grpc.StatusCode.OK


def reflection_of(address: str, credentials: Credentials) -> grpc.StatusCode:
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    asked = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    with ServerConnection(address, 60, credentials) as connection:
        replies = connection.channel.stream_stream(method, None, None)(iter([asked]), timeout=60)
        with suppress(grpc.RpcError):
            list(replies)
        return replies.code()


def test_the_token_is_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), server_of(Credentials(token=TOKEN)) as server:
        assert ask(server.address, Credentials(token=TOKEN)) == b"said"
        with pytest.raises(Unauthenticated):
            ask(server.address, Credentials(token="wrong"))
    assert TOKEN not in caplog.text


# -- TLS that does not come about


@pytest.mark.parametrize(
    ("why", "message"),
    [
        ("another authority", "is not of the authority in ELASTABLE_TLS_CA"),
        ("another name", "is not for that name or address"),
        ("plain text", "it speaks plain text"),
    ],
)
def test_a_server_without_trust_is_refused_at_once(ours: Authority, theirs: Authority, why: str, message: str) -> None:
    elsewhere = Credentials(None, *ours.issue("elsewhere", "elsewhere.example"))
    server_has = {"another authority": ours.mutual(None), "another name": elsewhere, "plain text": Credentials()}[why]
    client_has = theirs.mutual(None) if why == "another authority" else Credentials(ours.ca, token=TOKEN)
    with server_of(server_has) as server:
        assert message in refused_at_once(server.address, client_has)


def test_a_server_at_any_address_is_known_by_the_name_that_was_set(ours: Authority) -> None:
    certificate, key = ours.issue("elsewhere", "elsewhere.example")
    with server_of(Credentials(certificate=certificate, key=key)) as server:
        assert ask(server.address, Credentials(ours.ca, server_name="elsewhere.example")) == b"said"
        another = Credentials(ours.ca, server_name="another.example")
        assert "set ELASTABLE_TLS_NAME to one" in refused_at_once(server.address, another)
    with pytest.raises(BadInput, match=r"server_name \(ELASTABLE_TLS_NAME\) is 'a'.*ELASTABLE_TLS_CA\) is not set"):
        Credentials(server_name="a").for_client(LOOPBACK)


def test_a_tls_server_takes_any_client_that_knows_it_and_none_in_plain_text(ours: Authority) -> None:
    certificate, key = ours.issue("here", "127.0.0.1")
    with server_of(Credentials(certificate=certificate, key=key)) as server:
        assert ask(server.address, Credentials(ours.ca)) == b"said"
        with pytest.raises(Unavailable, match=r"perhaps it speaks TLS and this client does not \(ELASTABLE_TLS_CA\)"):
            ask(server.address, Credentials(), deadline_s=1.0)


@pytest.mark.parametrize("shown", ["none", "another's"])
def test_mutual_tls_takes_no_client_without_its_certificate(ours: Authority, theirs: Authority, shown: str) -> None:
    echo = Echo()
    certificate, key = theirs.issue("stranger", "127.0.0.1")
    stranger = Credentials(ours.ca) if shown == "none" else Credentials(ours.ca, certificate, key)
    with server_of(ours.mutual(None), echo) as server:
        assert ask(server.address, ours.mutual(None)) == b"said"
        with pytest.raises(Unavailable, match=f"{server.address} .*asks for another certificate"):
            ask(server.address, stranger, deadline_s=1.0)
    assert echo.calls == 1


# -- taken from the environment where none are given


def test_the_environment_is_used(files: dict[str, Path], theirs: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, file in files.items():
        monkeypatch.setenv(name, str(file))
    with MemoryStore() as store, GrpcServer("localhost:0", [client_service(store)]) as server:
        with open_store(f"grpc://{server.address}") as remote:
            assert remote.version() == 0
        stranger = Credentials(files["ELASTABLE_TLS_CA"], *theirs.issue("stranger", "localhost"), TOKEN)
        with RemoteSource(server.address, 1.0, stranger) as source, pytest.raises(Unavailable):
            source.version()


def test_no_credentials_are_none_whatever_is_set(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, file in files.items():
        monkeypatch.setenv(name, str(file))
    with server_of(Credentials()) as server:
        assert ask(server.address, Credentials()) == b"said"
