"""Errors cross the wire as what they are; everything else names address and deadline."""

import logging
import threading
from collections.abc import Iterator

import grpc
import pytest

from elastable.embedding_store import errors
from elastable.embedding_store.errors import (
    DeadlineExceeded,
    ElastableError,
    FutureVersion,
    JobFailed,
    PermissionDenied,
    StoreFailed,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from elastable.embedding_store.wire.access.credentials import Role
from elastable.embedding_store.wire.channels.server_connection import ServerConnection
from elastable.embedding_store.wire.channels.status_codes import ERROR_KEY, answering, translated
from elastable.embedding_store.wire.server.grpc_server import GrpcServer, Service

CLASSES = [getattr(errors, name) for name in errors.__all__]
MESSAGES = ["", "plain", "id 7 at position 3: 0 <= id < 5 (100 %)", "größer als\nzwei Zeilen", "汉字 " * 50]


class Private(FutureVersion):
    """A class that only the server knows."""


class Failing:
    error: Exception = ElastableError()
    attempts = 0

    def unary(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        with answering(context):
            self.attempts += 1
            raise self.error

    def stream(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        with answering(context):
            yield b"first"
            raise self.error

    def foreign(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode[request.decode()], "says a proxy")

    def slow(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        left = threading.Event()
        context.add_callback(left.set)
        left.wait(60)
        return b""


@pytest.fixture(scope="module")
def failing() -> Failing:
    return Failing()


@pytest.fixture(scope="module")
def connection(failing: Failing) -> Iterator[ServerConnection]:
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(failing.unary),
        "Stream": grpc.unary_stream_rpc_method_handler(failing.stream),
        "Foreign": grpc.unary_unary_rpc_method_handler(failing.foreign),
        "Slow": grpc.unary_unary_rpc_method_handler(failing.slow),
    }
    with (
        GrpcServer("127.0.0.1:0", [Service(STATUS, handlers)], anonymous=Role.ADMINISTRATOR) as server,
        ServerConnection(server.address, deadline_s=60) as connection,
    ):
        yield connection


# Reflection needs a service that has a descriptor; its methods are ours.
STATUS = "elastable.master.v1.Master"


def call(connection: ServerConnection, method: str) -> list[bytes]:
    if method == "Stream":
        stream = connection.channel.unary_stream(f"/{STATUS}/Stream", None, None)
        return connection.call(lambda timeout: list(stream(b"", timeout=timeout)))
    unary = connection.channel.unary_unary(f"/{STATUS}/{method}", None, None)
    return connection.call(lambda timeout: [unary(b"", timeout=timeout)])


@pytest.mark.parametrize("method", ["Unary", "Stream"])
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_classes_arrive(
    failing: Failing, connection: ServerConnection, kind: type[ElastableError], method: str
) -> None:
    for message in MESSAGES:
        failing.error = kind(message)
        with pytest.raises(ElastableError) as caught:
            call(connection, method)
        assert type(caught.value) is kind
        assert str(caught.value) == message
        assert isinstance(caught.value.__cause__, grpc.RpcError)


def test_an_error_that_a_server_answered_is_not_repeated(failing: Failing, connection: ServerConnection) -> None:
    failing.error, failing.attempts = Unavailable("redis://nowhere:1 is gone"), 0
    with pytest.raises(Unavailable, match="redis://nowhere:1"):
        call(connection, "Unary")
    assert failing.attempts == 1


def test_a_subclass_of_the_servers_own_arrives_as_its_base(failing: Failing, connection: ServerConnection) -> None:
    failing.error = Private("version 9")
    with pytest.raises(FutureVersion, match="version 9") as caught:
        call(connection, "Unary")
    assert type(caught.value) is FutureVersion


def test_an_unexpected_error_is_internal_names_its_class_and_is_logged(
    failing: Failing, connection: ServerConnection, caplog: pytest.LogCaptureFixture
) -> None:
    failing.error = KeyError("row")
    with caplog.at_level(logging.ERROR), pytest.raises(StoreFailed, match="KeyError: 'row'") as caught:
        call(connection, "Unary")
    assert isinstance(caught.value.__cause__, grpc.RpcError)
    assert caught.value.__cause__.code() is grpc.StatusCode.INTERNAL
    assert any(record.exc_info and record.exc_info[0] is KeyError for record in caplog.records)


def test_a_servers_failure_is_not_taken_for_one_of_this_client(failing: Failing, connection: ServerConnection) -> None:
    for failing.error in (OSError("CERTIFICATE_VERIFY_FAILED"), StoreFailed("CERTIFICATE_VERIFY_FAILED")):
        with pytest.raises(StoreFailed, match="CERTIFICATE_VERIFY_FAILED"):
            call(connection, "Unary")


@pytest.mark.parametrize("letter", ["a", "ü", "\ud800"])
def test_a_long_message_is_cut_and_keeps_its_class(failing: Failing, connection: ServerConnection, letter: str) -> None:
    failing.error = JobFailed("begins " + letter * 100_000)
    with pytest.raises(JobFailed, match=r"^begins .*\(100007 characters\)$"):
        call(connection, "Unary")


def test_the_status_tells_a_foreign_client_code_and_class(failing: Failing, connection: ServerConnection) -> None:
    failing.error = errors.IdOutOfRange("id 5")
    with pytest.raises(grpc.RpcError) as caught:
        connection.channel.unary_unary(f"/{STATUS}/Unary", None, None)(b"", timeout=60)
    assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
    assert caught.value.details() == "id 5"
    assert (ERROR_KEY, "IdOutOfRange") in [(key, value) for key, value in caught.value.trailing_metadata()]  # type: ignore[has-type, misc]


def test_a_call_that_is_not_served_is_unsupported(connection: ServerConnection) -> None:
    with pytest.raises(Unsupported, match="does not serve"):
        call(connection, "Missing")


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        ("PERMISSION_DENIED", PermissionDenied, "refuses: says a proxy"),
        ("UNAUTHENTICATED", Unauthenticated, "does not accept this client: says a proxy"),
        ("DATA_LOSS", StoreFailed, "failed: says a proxy"),
    ],
)
def test_a_status_of_another_program_on_the_way_is_named(
    connection: ServerConnection, code: str, kind: type[ElastableError], said: str
) -> None:
    foreign = connection.channel.unary_unary(f"/{STATUS}/Foreign", None, None)
    with pytest.raises(ElastableError, match=f"^{connection.address} {said}") as caught:
        connection.call(lambda timeout: foreign(code.encode(), timeout=timeout))
    assert type(caught.value) is kind


def test_what_is_no_call_is_a_failure_of_the_server() -> None:
    assert str(translated(grpc.RpcError("odd"), "a:1", 1.0)) == "a:1 failed: odd"


@pytest.mark.parametrize(("wait_s", "named"), [(0.0, r"0\.1 s"), (0.2, r"0\.1 s after the 0\.2 s that it was asked")])
def test_a_slow_answer_ends_at_its_named_deadline(connection: ServerConnection, wait_s: float, named: str) -> None:
    message = rf"{connection.address} gave no answer within the deadline of {named}"
    with ServerConnection(connection.address, 0.1) as hasty:
        slow = hasty.channel.unary_unary(f"/{STATUS}/Slow", None, None)
        with pytest.raises(DeadlineExceeded, match=message):
            hasty.call(lambda timeout: slow(b"", timeout=timeout), wait_s=wait_s)


def test_who_is_not_there_is_not_waited_for_longer_than_the_deadline() -> None:
    nobody = ServerConnection("127.0.0.1:1", deadline_s=0.3)
    timeouts = list[float]()
    call_nobody = nobody.channel.unary_unary(f"/{STATUS}/Slow", None, None)

    def attempt(timeout: float) -> bytes:
        timeouts.append(timeout)
        return call_nobody(b"", timeout=timeout)

    # Were the hour of the wait waited for, the test would end by its time limit.
    with pytest.raises(Unavailable, match=r"cannot be reached within the deadline of 0\.3 s"):
        nobody.call(attempt, wait_s=3600.0)
    assert all(timeout > 3599.0 for timeout in timeouts)  # one that is there again has all the time that it is given
    nobody.close()


def test_a_last_attempt_that_has_no_time_left_tells_of_the_one_before(connection: ServerConnection) -> None:
    with grpc.insecure_channel("127.0.0.1:1") as nobody:
        path = f"/{STATUS}/Slow"
        first, last = nobody.unary_unary(path, None, None), connection.channel.unary_unary(path, None, None)
        attempts = iter([lambda: first(b"", timeout=60), lambda: last(b"", timeout=0.1)])
        with pytest.raises(DeadlineExceeded, match=r"gave no answer .*before that it could not be reached .*refused"):
            connection.call(lambda _: next(attempts)())


@pytest.mark.parametrize("deadline_s", [0, -1, float("nan")])
def test_a_deadline_must_be_above_zero(deadline_s: float) -> None:
    with pytest.raises(errors.BadInput, match="deadline"):
        ServerConnection("127.0.0.1:1", deadline_s)
