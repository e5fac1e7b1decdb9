"""A server under load goes on answering: rightly, everybody, and none of it is timed."""

from collections.abc import Iterator

import grpc
import pytest

from benchmarks.calls.load import Load, measure
from benchmarks.calls.sessions import STILL, serving
from benchmarks.calls.silent_clients import SilentClients
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.wire.messages.store_messages import STORE_SERVICE
from elastable.embedding_store.wire.server.call_room import CallLimits
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.service.store_service import store_service
from tests.waiting import until

WAIT_S = 60.0


@pytest.fixture
def address() -> Iterator[str]:
    with MemoryStore(1) as store:
        store.create_table(TableSpec(STILL, 16, 100_000))
        limits = CallLimits(threads=16, first_message_s=1.0)
        with GrpcServer("127.0.0.1:0", [store_service(store)], limits) as server:
            yield server.address


def test_a_good_client_is_answered_beside_silent_and_busy_ones(address: str) -> None:
    waits = measure(address, Load("some of each", silent=40, busy=4), lookups=10)
    assert (waits.wrong, waits.unanswered) == (0, 0)
    assert len(waits.seconds) == 10


def test_a_good_client_is_answered_beside_workers_that_push_and_slow_clients() -> None:
    with serving(grads_to_wait=2) as served:
        waits = measure(served.address, Load("all of it", silent=20, pushing=4, slow=True), lookups=50)
        assert served.mark()["pushes"] > 0
    assert (waits.wrong, waits.unanswered) == (0, 0)
    assert len(waits.seconds) == 50


def test_silent_clients_are_silent_clients(address: str) -> None:
    with SilentClients(address, f"/{STORE_SERVICE}/LookupSmall", 8) as silent:
        until(lambda: silent.ended >= 8)  # each of the four that opened a call, at least twice
        assert silent.connected == 8
        with grpc.insecure_channel(address) as channel:
            call = channel.unary_unary(f"/{STORE_SERVICE}/GetStoreStatus", None, None)
            call(b"", timeout=WAIT_S, wait_for_ready=True)
