"""Rows over gRPC: the same rows, versions and errors as the store behind, and errors of the wire's own."""

import itertools
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection as Pipe

import grpc
import numpy as np
import pytest

from elastable.embedding_store import Commit, MemoryStore, OptimizerSpec, RemoteSource, TableSpec, TableUpdate, errors
from elastable.embedding_store.support.array_body import MAX_BODY_BYTES
from elastable.embedding_store.v1 import store_pb2, store_pb2_grpc
from elastable.embedding_store.wire.channels.server_connection import ServerConnection
from elastable.embedding_store.wire.channels.status_codes import ERROR_KEY
from elastable.embedding_store.wire.messages.frames import REQUEST_KEY, encode
from elastable.embedding_store.wire.messages.store_messages import STORE_SERVICE
from elastable.embedding_store.wire.server.grpc_server import GrpcServer, Service
from tests.contracts.store_samples import create_tables
from tests.embedding_store.serving import serving
from tests.embedding_store.wire.test_shared_processes import heard, process

pytestmark = pytest.mark.process

WIDE = TableSpec("wide", 64, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.1))
NARROW = TableSpec("narrow", 3, vocabulary_size=1_000, seed=7)
WIDEST = TableSpec("widest", 65_536)
SPECS = {spec.name: spec for spec in (WIDE, NARROW, WIDEST)}


@pytest.fixture(scope="module")
def store() -> Iterator[MemoryStore]:
    with create_tables(MemoryStore(), *SPECS.values()) as store:
        ids = np.arange(500)
        gradients = np.random.default_rng(0).normal(size=(500, 64)).astype(np.float32)
        store.commit(Commit(1, {"wide": TableUpdate(ids, gradients)}, 0, {}))
        yield store


@pytest.fixture(scope="module")
def server(store: MemoryStore) -> Iterator[GrpcServer]:
    with serving(store) as server:
        yield server


@pytest.fixture(scope="module")
def remote(server: GrpcServer) -> Iterator[RemoteSource]:
    with RemoteSource(server.address, deadline_s=60) as remote:
        yield remote


@pytest.fixture
def stub(server: GrpcServer) -> Iterator[store_pb2_grpc.StoreStub]:
    with grpc.insecure_channel(server.address) as channel:
        yield store_pb2_grpc.StoreStub(channel)


def assert_same_rows(remote: RemoteSource, store: MemoryStore, ids: dict[str, np.ndarray]) -> None:
    ours, theirs = remote.lookup(ids), store.lookup(ids)
    assert list(ours) == list(ids)
    for table in ids:
        assert ours[table].dtype == np.float32
        assert ours[table].flags.writeable
        np.testing.assert_array_equal(ours[table], theirs[table])


# One row and few rows take one frame each way, 65,536 take many, 200,000 also ask in several.
@pytest.mark.parametrize("count", [0, 1, 2_048, 2_049, 65_536, 200_000])
def test_rows_are_the_stores(remote: RemoteSource, store: MemoryStore, count: int) -> None:
    ids = np.random.default_rng(count).integers(-(2**63), 2**63 - 1, count, dtype=np.int64)
    ids[::3] = np.arange(len(ids[::3])) % 600
    assert_same_rows(remote, store, {"wide": ids})
    assert_same_rows(remote, store, {"wide": ids[::-7]})


def test_thousands_of_tables_take_one_call() -> None:
    ids = {f"{number:0200d}": np.arange(1) for number in range(5_200)}
    tables = [store_pb2.TableIds(table=name, count=1) for name in ids]
    # Names of 200 letters make headers of more than 1 MiB, so the rows do not fit with them.
    request = store_pb2.LookupRequest(header=store_pb2.LookupHeader(tables=tables), body=bytes(8 * len(ids)))
    with MemoryStore() as many, serving(many) as server:
        for name in ids:
            many.create_table(TableSpec(name, 128))
        with RemoteSource(server.address, 60) as remote:
            for _ in range(2):  # the second time their dims are known
                assert_same_rows(remote, many, ids)
        with grpc.insecure_channel(server.address) as channel:
            stub = store_pb2_grpc.StoreStub(channel)
            with pytest.raises(grpc.RpcError, match="call Lookup"):
                stub.LookupSmall(request, timeout=60)


def test_a_lookup_waits_at_the_server_for_its_version() -> None:
    ids = {"t": np.arange(3)}
    with MemoryStore() as waiting, serving(waiting) as own:
        waiting.create_table(TableSpec("t", 2, optimizer=OptimizerSpec.of("sgd", learning_rate=1.0)))
        with RemoteSource(own.address, 60) as source, ThreadPoolExecutor(1) as pool:
            with pytest.raises(errors.FutureVersion, match="version 1 is not committed"):
                source.lookup_when(ids, 1, 0.01)
            asked = pool.submit(source.lookup_when, ids, 1, 30.0)
            waiting.commit(Commit(1, {"t": TableUpdate(np.arange(3), np.ones((3, 2), np.float32))}, 0, {}))
            np.testing.assert_array_equal(asked.result(timeout=60)["t"], waiting.lookup(ids)["t"])


@pytest.mark.parametrize(
    ("wait_ms", "message"), [(-1, "wait from 0 to 60000"), (60_001, "wait from 0 to 60000"), (9_000, "does not wait")]
)
def test_a_wait_that_is_too_long_and_one_of_a_call_without_waits_are_refused(
    stub: store_pb2_grpc.StoreStub, wait_ms: int, message: str
) -> None:
    request = store_pb2.LookupRequest(header=store_pb2.LookupHeader(version=2, wait_ms=wait_ms))
    with pytest.raises(grpc.RpcError, match=message) as caught:
        stub.LookupSmall(request, timeout=60)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_request_in_the_metadata_is_answered_before_any_message_comes(
    server: GrpcServer, stub: store_pb2_grpc.StoreStub, store: MemoryStore
) -> None:
    ids, never = np.arange(3), threading.Event()
    header = store_pb2.LookupHeader(tables=[store_pb2.TableIds(table="wide", count=3)])
    request = store_pb2.LookupRequest(header=header, body=ids.tobytes()).SerializeToString()
    with grpc.insecure_channel(server.address) as channel:
        lookup = channel.stream_unary(f"/{STORE_SERVICE}/LookupSmall", None, store_pb2.LookupReply.FromString)
        messages = (b"" for _ in range(1) if never.wait(60))
        reply = lookup(messages, timeout=60, metadata=((REQUEST_KEY, request),))
        never.set()
    assert reply.body == store.lookup({"wide": ids})["wide"].tobytes()
    status = stub.GetStoreStatus(store_pb2.StoreStatusRequest(), metadata=((REQUEST_KEY, b"\x18\x01"),))  # tables
    assert {table.spec.name for table in status.tables} == set(SPECS)


@pytest.mark.parametrize("name", ["LookupSmall", "GetStoreStatus"])
def test_a_request_in_the_metadata_that_is_none_is_refused_by_name(server: GrpcServer, name: str) -> None:
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary(f"/{STORE_SERVICE}/{name}", None, None)
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", timeout=60, metadata=((REQUEST_KEY, b"\xff\xff"),))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_client_of_generated_stubs_is_answered(stub: store_pb2_grpc.StoreStub, store: MemoryStore) -> None:
    ids = np.arange(20_000)
    header = store_pb2.LookupHeader(tables=[store_pb2.TableIds(table="wide", count=len(ids))])
    asked = [
        store_pb2.LookupRequest(header=header, body=ids[:10].tobytes()[:-3]),
        store_pb2.LookupRequest(body=ids[:10].tobytes()[-3:] + ids[10:].tobytes()),
    ]
    replies = list(stub.Lookup(iter(asked), timeout=60))
    assert len(replies) > 1
    assert replies[0].header.tables[0] == store_pb2.TableRows(table="wide", count=20_000, dim=64, dtype="float32")
    assert replies[0].header.version == 1
    assert b"".join(reply.body for reply in replies) == store.lookup({"wide": ids})["wide"].tobytes()
    header = store_pb2.LookupHeader(tables=[store_pb2.TableIds(table="narrow", count=2)])
    reply = stub.LookupSmall(store_pb2.LookupRequest(header=header, body=ids[:2].tobytes()), timeout=60)
    assert reply.body == store.lookup({"narrow": ids[:2]})["narrow"].tobytes()
    tables = stub.GetStoreStatus(store_pb2.StoreStatusRequest(rows=True), timeout=60).tables
    assert {table.spec.name: table.rows for table in tables}["wide"] == 500


def header_of(count: int, table: str = "wide", times: int = 1) -> bytes:
    tables = [store_pb2.TableIds(table=table, count=count)] * times
    return store_pb2.LookupHeader(tables=tables).SerializeToString()


MALFORMED = {
    "no frame": ([], "ended before its first frame"),
    "noise": ([b"\x0a\x7fabc"], "truncated frame"),
    "too long": ([*encode(header_of(1), [np.arange(2)])], "longer than the 8 bytes"),
    "negative count": ([*encode(header_of(-1), [])], "negative size"),
    "huge count": ([*encode(header_of(2**62), [])], str(MAX_BODY_BYTES)),
    "huge reply": ([*encode(header_of(16_385, "widest"), [np.zeros(16_385, np.int64)])], "asks for 4295229440 bytes"),
    "table twice": ([*encode(header_of(1, times=2), [np.arange(2)])], "twice"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_requests_of_a_raw_client_are_refused(server: GrpcServer, case: str) -> None:
    frames, message = MALFORMED[case]
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError, match=message) as caught:
        list(channel.stream_stream(f"/{STORE_SERVICE}/Lookup", None, None)(iter(frames), timeout=60))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(caught.value.trailing_metadata())[ERROR_KEY] in ("BadInput", "BadIds")  # type: ignore[arg-type, index]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ([], "ended before its first frame"),
        ([(0, 2, "float32", bytes(24))], "0 rows of table"),
        ([(1, 2, "float16", bytes(4))], "'float16'"),
        ([(1, 2, "float32", bytes(7))], "ended after 7 of the 8"),
        ([(1, -2, "float32", b"")], "negative"),
    ],
)
def test_an_answer_without_sense_is_a_failure(reply: list[tuple[int, int, str, bytes]], message: str) -> None:
    def lookup(frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for count, dim, dtype, body in reply:
            table = store_pb2.TableRows(table="t", count=count, dim=dim, dtype=dtype)
            header = store_pb2.LookupReplyHeader(tables=[table]).SerializeToString()
            yield from encode(header, [np.frombuffer(body, np.uint8)])

    service = Service(STORE_SERVICE, {"Lookup": grpc.stream_stream_rpc_method_handler(lookup)})
    with (
        GrpcServer("127.0.0.1:0", [service]) as server,
        RemoteSource(server.address, 60) as remote,
        pytest.raises(errors.StoreFailed, match=message) as caught,
    ):
        remote.lookup({"t": np.arange(1)})
    assert server.address in str(caught.value)


def test_a_peer_that_takes_connections_and_says_nothing_is_left_at_the_deadline() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        with (
            RemoteSource(address, deadline_s=0.5) as remote,
            pytest.raises(errors.Unavailable, match=r"deadline of 0\.5 s"),
        ):
            remote.version()


def serve_half_an_answer(pipe: Pipe) -> None:
    """In a separate process: sends a first frame, and then nothing until it is killed."""

    def lookup(frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        table = store_pb2.TableRows(table="t", count=1 << 20, dim=64, dtype="float32")
        rows = np.zeros((1 << 20, 64), np.float32)
        header = store_pb2.LookupReplyHeader(tables=[table]).SerializeToString()
        for number, frame in enumerate(itertools.islice(encode(header, [rows]), 3)):
            yield frame
            if number == 2:
                pipe.send("half sent")
                threading.Event().wait(120)

    service = Service(STORE_SERVICE, {"Lookup": grpc.stream_stream_rpc_method_handler(lookup)})
    with GrpcServer("127.0.0.1:0", [service]) as server:
        pipe.send(server.address)
        threading.Event().wait(120)


def test_a_server_killed_in_mid_stream_is_unavailable() -> None:
    with process(serve_half_an_answer) as (server, pipe), ThreadPoolExecutor(1) as pool:
        remote = RemoteSource(heard(pipe), deadline_s=3)
        looked = pool.submit(remote.lookup, {"t": np.arange(1 << 20)})
        assert heard(pipe) == "half sent"
        server.kill()
        with pytest.raises(errors.Unavailable, match=rf"{remote.address} .*3 s"):
            looked.result(60)
        remote.close()


def test_a_source_on_anothers_connection_leaves_it_open(server: GrpcServer) -> None:
    connection = ServerConnection(server.address, deadline_s=60)
    RemoteSource(connection).close()
    assert RemoteSource(connection).version() == 1
    connection.close()
    with pytest.raises(errors.ElastableError, match="closed"):
        RemoteSource(connection).version()
