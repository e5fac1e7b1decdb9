"""The server: where it listens, what it shows of itself, how it stops."""

import socket
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from elastable.embedding_store import MemoryStore
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.messages.store_messages import STORE_SERVICE
from elastable.embedding_store.wire.server.grpc_server import GrpcServer, Service
from elastable.embedding_store.wire.service.store_service import store_service
from tests.embedding_store.serving import serving
from tests.waiting import until


def test_an_address_in_use_is_refused_by_name() -> None:
    services = [store_service(MemoryStore())]
    with (
        GrpcServer("127.0.0.1:0", services) as server,
        pytest.raises(BadInput, match="Address already in use") as caught,
    ):
        GrpcServer(server.address, services)
    assert server.address in str(caught.value)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(BadInput, match="Address already in use"):
            GrpcServer(f"127.0.0.1:{other.getsockname()[1]}", [store_service(MemoryStore())])


@pytest.mark.parametrize("address", ["192.0.2.1:0", "no-such-host.invalid:0", "nonsense"])
def test_an_address_that_is_not_ours_is_refused_by_name(address: str) -> None:
    with pytest.raises(BadInput, match=address):
        GrpcServer(address, [store_service(MemoryStore())], insecure=True)


@pytest.fixture
def channel() -> Iterator[grpc.Channel]:
    with serving(MemoryStore()) as server, grpc.insecure_channel(server.address) as channel:
        yield channel


def test_stopping_closes_services_frees_the_port_and_may_be_repeated() -> None:
    closed: list[bool] = []
    server = GrpcServer("127.0.0.1:0", [Service(STORE_SERVICE, {}, lambda: closed.append(True))])
    server.stop(0.1)
    server.stop(0.1)
    assert closed
    with serving(MemoryStore(), address=server.address) as again:
        assert again.address == server.address


def test_a_service_that_is_not_ready_is_reported_and_so_is_the_whole() -> None:
    why: list[str | None] = ["the store does not answer"]
    services = [store_service(MemoryStore(), not_ready=lambda: why[0]), Service("other.Service", {})]
    with GrpcServer("127.0.0.1:0", services) as server, grpc.insecure_channel(server.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        names = (STORE_SERVICE, "other.Service", "")

        def reported() -> list[bool]:
            replies = [check(health_pb2.HealthCheckRequest(service=name), timeout=60) for name in names]
            return [reply.status == health_pb2.HealthCheckResponse.SERVING for reply in replies]

        assert reported() == [False, True, False]
        assert server.health.not_ready() == {STORE_SERVICE: "the store does not answer"}
        why[0] = None
        assert reported() == [True, True, True]
        with pytest.raises(grpc.RpcError) as caught:
            check(health_pb2.HealthCheckRequest(service="of nobody"), timeout=60)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_calls_are_counted_by_method_and_code() -> None:
    store = MemoryStore()
    with serving(store) as server, grpc.insecure_channel(server.address) as channel:
        count = channel.unary_unary(
            f"/{STORE_SERVICE}/TableStatistics", store_pb2.TableStatisticsRequest.SerializeToString, None
        )
        with pytest.raises(grpc.RpcError):
            count(store_pb2.TableStatisticsRequest(table="none"), timeout=60)
        channel.unary_unary(f"/{STORE_SERVICE}/GetStoreStatus", None, None)(b"", timeout=60)
        for name in ("no.such/Call", "no.such/Other"):
            with pytest.raises(grpc.RpcError):
                channel.unary_unary(f"/{name}", None, None)(b"", timeout=60)
        expected = {
            (f"{STORE_SERVICE}/TableStatistics", "NOT_FOUND"): 1,
            (f"{STORE_SERVICE}/GetStoreStatus", "OK"): 1,
            ("other", "UNIMPLEMENTED"): 2,
        }
        until(lambda: server.calls.totals() == expected)  # counted once it has ended, which its client may hear before
