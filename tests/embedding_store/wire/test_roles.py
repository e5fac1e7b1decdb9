"""Who may do what: readers, workers and administrators at real servers, known by token or certificate."""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import grpc
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc

from elastable.embedding_store import MemoryStore, OptimizerSpec, RemoteStore, TableSpec
from elastable.embedding_store.errors import (
    BadInput,
    ElastableError,
    PermissionDenied,
    StaleVersion,
    Unauthenticated,
    Unsupported,
)
from elastable.embedding_store.optimizers import registry
from elastable.embedding_store.optimizers.base import KERAS_BLOCK, RowOptimizer
from elastable.embedding_store.optimizers.fused import FUSED
from elastable.embedding_store.shards.shard import Shard
from elastable.embedding_store.v1 import store_pb2, store_pb2_grpc
from elastable.embedding_store.wire.access.credentials import Credentials, Role, rule_of_call
from elastable.embedding_store.wire.channels.server_connection import channel
from elastable.embedding_store.wire.pushes.shard_service import shard_service
from elastable.embedding_store.wire.server import grpc_server
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.master.api import JobSpec
from elastable.master.commits.dense_part import DensePart
from elastable.master.core.job_master import Master
from elastable.master.model.wrapping_optimizers import with_averages
from elastable.master.rpc.master_service import master_service
from elastable.master.tasks.progress import Progress
from elastable.master.v1 import master_pb2
from tests.certificates import Authority
from tests.contracts.store_samples import commit, create_tables, dynamic, int64, rows_by_id, update
from tests.embedding_store.serving import client_service

ADMINISTRATOR, WORKER, READER = "of-the-administrator", "of-the-workers", "of-the-readers"
SERVER = Credentials(token=ADMINISTRATOR, worker_token=WORKER, reader_token=READER)
TABLE = "people"


def methods() -> dict[str, bool]:
    """Every call of our services, as the protocol files declare them -> whether it answers with a stream."""
    services = [*store_pb2.DESCRIPTOR.services_by_name.values(), *master_pb2.DESCRIPTOR.services_by_name.values()]
    return {f"/{one.full_name}/{call.name}": call.server_streaming for one in services for call in one.methods}


def as_role(role: Role) -> Credentials:
    return Credentials(token={Role.ADMINISTRATOR: ADMINISTRATOR, Role.WORKER: WORKER, Role.READER: READER}[role])


def serve(held: ExitStack, credentials: Credentials, anonymous: Role | None = None) -> tuple[MemoryStore, str]:
    """A parameter server, as `elastable serve` has it, with one table that was trained once; and its owner's calls."""
    store = create_tables(held.enter_context(MemoryStore(1)), dynamic())
    commit(store, {TABLE: update(int64(1, 2), 5)})
    rows, owned = client_service(store), shard_service(Shard(store, 1 << 20))
    rows = replace(rows, handlers={**owned.handlers, **rows.handlers})
    master = Master(JobSpec(train_records=9), store, DensePart(), start=Progress(version=1))
    services = [rows, master_service(master)]
    server = GrpcServer("127.0.0.1:0", services, credentials=credentials, anonymous=anonymous)
    return store, held.enter_context(server).address


def client(held: ExitStack, address: str, credentials: Credentials) -> RemoteStore:
    return held.enter_context(RemoteStore(address, 60, credentials))


def code_of(opened: grpc.Channel, method: str) -> grpc.StatusCode:
    """What a call without a message ends with; one that is let through asks for its message."""
    try:
        list(opened.stream_stream(method, None, None)(iter(()), timeout=60))
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


# -- what only known callers may ask for


@pytest.mark.parametrize("within", [0, 1, 2])
def test_a_stranger_has_no_server_import_a_framework(
    held: ExitStack, within: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = list[OptimizerSpec]()

    def import_keras(spec: OptimizerSpec) -> RowOptimizer:
        imported.append(spec)
        raise Unsupported("it is imported")

    monkeypatch.setitem(registry._registered, KERAS_BLOCK, import_keras)
    optimizer = OptimizerSpec(KERAS_BLOCK, (("learning_rate", 0.1),), '{"class_name": "Lamb"}')
    for _ in range(within):
        optimizer = with_averages(optimizer, 0.9, None)
    stranger = client(held, serve(held, Credentials())[1], Credentials())
    with pytest.raises(PermissionDenied, match=r"'keras'.*its optimizer has no kernel here.*ELASTABLE_WORKER_TOKEN_FI"):
        stranger.create_table(TableSpec("keras", 4, optimizer=optimizer))
    assert not imported
    for name in FUSED:  # by name, whatever it is named in Keras
        stranger.create_table(TableSpec(name, 4, optimizer=OptimizerSpec(name)))
    worker = client(held, serve(held, SERVER)[1], as_role(Role.WORKER))
    with pytest.raises(ElastableError, match="it is imported"):
        worker.create_table(TableSpec("keras", 4, optimizer=optimizer))
    assert imported


# -- the table


def test_every_call_of_the_protocol_has_a_role() -> None:
    for method in methods():
        call = descriptor_pool.Default().FindMethodByName(method.strip("/").replace("/", "."))
        assert call.GetOptions().Extensions[store_pb2.least_role], f"{method}: say its least_role in proto/"


def test_a_call_that_the_table_does_not_have_is_for_administrators() -> None:
    for unknown in ("/elastable.master.v1.Master/New", "/elastable.new.v1.New/New", "/New", "", "//"):
        assert rule_of_call(unknown).role is Role.ADMINISTRATOR


def test_calls_for_administrators_answer_once_so_that_the_log_knows_their_outcome() -> None:
    streams = methods()
    assert not [call for call in streams if rule_of_call(call).role is Role.ADMINISTRATOR and streams[call]]


@pytest.mark.parametrize("role", Role)
def test_every_call_is_refused_to_each_role_below_its_own_and_to_none_above(held: ExitStack, role: Role) -> None:
    _, address = serve(held, SERVER)
    with channel(address, as_role(role)) as opened:
        refused = {method for method in methods() if code_of(opened, method) is grpc.StatusCode.PERMISSION_DENIED}
    assert refused == {method for method in methods() if role < rule_of_call(method).role}


# -- by token


def test_a_reader_looks_up_and_changes_nothing(held: ExitStack) -> None:
    store, address = serve(held, SERVER)
    before, reader = rows_by_id(store, TABLE), client(held, address, Credentials(reader_token=READER))
    assert reader.version() == 1
    assert reader.lookup({TABLE: int64(1)})[TABLE].shape == (1, 5)
    with reader.pin(1) as pin:
        assert pin.row_count(TABLE) == 2
    attempts: list[tuple[str, Callable[[], object]]] = [
        ("CreateTable", lambda: reader.create_table(dynamic("others"))),
        ("PushRows", lambda: commit(reader, {TABLE: update(int64(1), 5)})),
        ("Put", lambda: reader.put(TABLE, [store.read_rows(TABLE, int64(1))])),
        ("Delete", lambda: reader.delete(TABLE, int64(1))),
    ]
    for call, attempt in attempts:
        with pytest.raises(PermissionDenied, match=f"{call} is for the role .*, and this caller's is reader"):
            attempt()
    assert (store.version(), rows_by_id(store, TABLE), list(store.specs())) == (1, before, [TABLE])


def test_a_stranger_learns_nothing(held: ExitStack) -> None:
    _, address = serve(held, SERVER)
    with channel(address, Credentials()) as opened:
        codes = {code_of(opened, method) for method in (*methods(), "/elastable.master.v1.Master/Missing")}
    assert codes == {grpc.StatusCode.UNAUTHENTICATED}


def test_a_message_is_not_read_before_the_role_is_known(held: ExitStack) -> None:
    """Else refused callers could have the server read what it is not to do."""
    _, address = serve(held, SERVER)
    with channel(address, as_role(Role.READER)) as opened:
        sent = 0

        def frames() -> Iterator[bytes]:
            nonlocal sent
            for _ in range(64):
                sent += 1
                yield bytes(1 << 20)

        with pytest.raises(grpc.RpcError) as caught:
            opened.stream_unary("/elastable.embedding_store.v1.Store/PushRows", None, None)(frames(), timeout=60)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert sent < 64


# -- a server that nobody gave a token


def test_without_tokens_everybody_reads_creates_and_pushes_and_nobody_destroys(held: ExitStack) -> None:
    store, address = serve(held, Credentials())
    anyone = client(held, address, Credentials())
    assert anyone.create_table(dynamic("others"))
    commit(anyone, {TABLE: update(int64(9), 5)})
    for attempt in (lambda: anyone.drop_table(TABLE), lambda: anyone.reset_version(0)):
        with pytest.raises(PermissionDenied, match="start the server with ELASTABLE_TOKEN_FILE"):
            attempt()
    with channel(address, Credentials()) as opened:
        assert code_of(opened, "/elastable.master.v1.Master/StopJob") is grpc.StatusCode.PERMISSION_DENIED
    assert set(store.specs()) == {TABLE, "others"}


def test_a_program_may_say_what_callers_without_a_token_are(held: ExitStack) -> None:
    _, address = serve(held, Credentials(worker_token=WORKER), anonymous=Role.READER)
    with pytest.raises(PermissionDenied, match=r"PushRows .* and this caller's is reader \(no token"):
        commit(client(held, address, Credentials()), {TABLE: update(int64(9), 5)})
    commit(client(held, address, Credentials(worker_token=WORKER)), {TABLE: update(int64(9), 5)})
    with pytest.raises(Unauthenticated, match="its token is not this server's"):
        client(held, address, Credentials(token="another")).version()


# -- by certificate


def of_name(ours: Authority, name: str, **more: str) -> Credentials:
    return Credentials(ours.ca, *ours.issue(name, name, "127.0.0.1"), **more)  # type: ignore[arg-type]


def test_certificates_have_roles_by_their_names(held: ExitStack, ours: Authority) -> None:
    roles = {"ops.example": "administrator", "trainer.example": "worker", "*": "reader"}
    own = ours.issue("server", "127.0.0.1")
    store, address = serve(held, Credentials(ours.ca, *own, certificate_roles=roles))
    somebody, trainer = (client(held, address, of_name(ours, name)) for name in ("some.example", "trainer.example"))
    assert somebody.version() == 1
    with pytest.raises(PermissionDenied, match=r"PushRows .* reader .*'some\.example'"):
        commit(somebody, {TABLE: update(int64(9), 5)})
    commit(trainer, {TABLE: update(int64(9), 5)})
    with pytest.raises(PermissionDenied, match=r"DropTable .* worker .*'trainer\.example'"):
        trainer.drop_table(TABLE)
    client(held, address, of_name(ours, "ops.example")).drop_table(TABLE)
    assert not store.specs()


def test_a_certificate_without_a_role_is_refused_by_its_name(held: ExitStack, ours: Authority) -> None:
    own = ours.issue("server", "127.0.0.1")
    _, address = serve(held, Credentials(ours.ca, *own, certificate_roles={"ops.example": "administrator"}))
    with pytest.raises(Unauthenticated, match=r"'some\.example'.* has no role here"):
        client(held, address, of_name(ours, "some.example")).version()


def test_token_and_certificate_must_both_allow_a_call(held: ExitStack, ours: Authority) -> None:
    own = ours.issue("server", "127.0.0.1")
    roles = {"ops.example": "administrator", "*": "reader"}
    _, address = serve(held, Credentials(ours.ca, *own, ADMINISTRATOR, WORKER, certificate_roles=roles))
    for name, tokens in (("ops.example", {"worker_token": WORKER}), ("some.example", {"token": ADMINISTRATOR})):
        with pytest.raises(PermissionDenied):
            client(held, address, of_name(ours, name, **tokens)).drop_table(TABLE)
    client(held, address, of_name(ours, "ops.example", token=ADMINISTRATOR)).drop_table(TABLE)


# -- pins in the way


def test_a_clients_pin_does_not_keep_an_administrator_from_dropping(held: ExitStack) -> None:
    store, address = serve(held, SERVER)
    pin = client(held, address, as_role(Role.READER)).pin(lease_s=3600)
    administrator = client(held, address, SERVER)
    for attempt in (
        lambda: administrator.drop_table(TABLE),
        lambda: administrator.clear(TABLE),
        lambda: administrator.reset_version(3),
    ):
        with pytest.raises(BadInput, match=r"pinned, by ipv4:127\.0\.0\.1:\d+ \(version 1\): .*force"):
            attempt()
    with pytest.raises(BadInput, match="no table 'nobody'"):
        administrator.drop_table("nobody", force=True)
    assert pin.row_count(TABLE) == 2, "no pin is given up for nothing"
    administrator.clear(TABLE, force=True)
    administrator.drop_table(TABLE, force=True)
    administrator.reset_version(3, force=True)
    with pytest.raises(StaleVersion, match="an administrator gave it up"):
        pin.row_count(TABLE)
    assert (store.version(), store.specs(), store.pins()) == (3, {}, ())


# -- the audit log


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[tuple[str, str]]]:
    monkeypatch.setattr(grpc_server, "_REFUSED", grpc_server._Budget())
    caplog.set_level(logging.INFO, "elastable.audit")

    def reported() -> list[tuple[str, str]]:
        of_audit = [record for record in caplog.records if record.name == "elastable.audit"]
        return [(record.levelname, record.getMessage()) for record in of_audit]

    return reported


def test_the_log_says_who_did_what_and_the_outcome(held: ExitStack, lines: Callable[[], list[tuple[str, str]]]) -> None:
    store, address = serve(held, SERVER)
    administrator = client(held, address, SERVER)
    administrator.delete(TABLE, int64(1))
    with pytest.raises(BadInput):
        administrator.drop_table("no\nFORGED \x1b[31mline")
    administrator.reset_version(7)
    with pytest.raises(PermissionDenied):
        client(held, address, as_role(Role.WORKER)).drop_table(TABLE)
    with pytest.raises(Unauthenticated):
        client(held, address, Credentials(token="another")).drop_table(TABLE)
    commit(store, {TABLE: update(int64(1), 5)})
    # These are no administrative calls: not in the log.
    client(held, address, SERVER).version()
    health = health_pb2_grpc.HealthStub(held.enter_context(channel(address, SERVER)))
    health.Check(health_pb2.HealthCheckRequest(), timeout=60)
    who = r"administrator \(the administrator's token\) from ipv4:127\.0\.0\.1:\d+"
    expected = [
        ("INFO", rf'Delete by {who} \(table: "people" count: 1\): done'),
        ("WARNING", rf"DropTable by {who} \(table: .*FORGED .*\): failed: no table .*"),
        ("INFO", rf"ResetVersion by {who} \(version: 7\): done"),
        ("WARNING", r"DropTable by worker \(the worker's token\) from \S+: refused: DropTable is for the role .*"),
        ("WARNING", r"DropTable by a stranger from \S+: refused: its token is not this server's .*"),
    ]
    for (level, line), (wanted, pattern) in zip(lines(), expected, strict=True):
        assert level == wanted
        assert re.fullmatch(pattern, line), line
        assert line.isprintable()
        assert not any(secret in line for secret in (ADMINISTRATOR, WORKER, READER, "another"))


def test_refused_calls_do_not_fill_the_log(held: ExitStack, lines: Callable[[], list[tuple[str, str]]]) -> None:
    _, address = serve(held, SERVER)
    stub = store_pb2_grpc.StoreStub(held.enter_context(channel(address, as_role(Role.READER))))
    for _ in range(300):
        with pytest.raises(grpc.RpcError):
            stub.DropTable(store_pb2.DropTableRequest(table=TABLE), timeout=60)
    with_left_out = [line for _, line in lines() if "are not in this log" in line]
    assert len(lines()) < 300
    assert len(with_left_out) <= len(lines()) // 20 + 1


def test_frames_of_bulk_calls_are_found_by_their_service() -> None:
    """As the log does, for every administrative call that is sent in frames."""
    for method in methods():
        found = descriptor_pool.Default().FindMethodByName(method.strip("/").replace("/", "."))
        if rule_of_call(method).role is Role.ADMINISTRATOR and found.client_streaming:
            assert "header" in GetMessageClass(found.input_type).DESCRIPTOR.fields_by_name
