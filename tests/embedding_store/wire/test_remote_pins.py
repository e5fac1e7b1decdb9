"""Pins over the wire: kept by the server, counted once, freed after a client that died."""

import time
import uuid
from contextlib import ExitStack
from multiprocessing.connection import Connection as Pipe

import numpy as np
import pytest

from elastable.embedding_store import MemoryStore, OptimizerSpec, RemoteSource, RemoteStore, TableSpec
from elastable.embedding_store.errors import BadInput, StaleVersion, Unavailable
from elastable.embedding_store.v1 import store_pb2, store_pb2_grpc
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.service import store_service as service
from elastable.embedding_store.wire.service.store_service import store_service
from tests.contracts.store_samples import commit, create_tables, int64, rows_by_id, update
from tests.embedding_store.serving import serving
from tests.embedding_store.wire.test_shared_processes import heard, process
from tests.waiting import until

pytestmark = pytest.mark.process

SPEC = TableSpec("t", 8, None, optimizer=OptimizerSpec.of("adam"))
IDS = np.arange(60)
_WAIT_S = 60.0


def serve(held: ExitStack) -> tuple[MemoryStore, GrpcServer]:
    """A store at version 1 and a server for reading it."""
    store = create_tables(held.enter_context(MemoryStore(threads=2)), SPEC)
    commit(store, {"t": update(IDS, 8)})
    return store, held.enter_context(GrpcServer("127.0.0.1:0", [store_service(store)]))


def test_a_store_that_is_only_read_from_can_be_pinned(held: ExitStack) -> None:
    store, server = serve(held)
    remote, other = held.enter_context(RemoteStore(server.address)), held.enter_context(RemoteSource(server.address))
    rows, before = store.lookup({"t": IDS}), rows_by_id(store, "t")
    with remote.pin() as pin:
        commit(store, {"t": update(IDS, 8)})
        np.testing.assert_array_equal(other.lookup({"t": IDS}, 1)["t"], rows["t"])
        assert rows_by_id(pin, "t", 7) == before  # type: ignore[arg-type]
        store.delete("t", IDS[:5])
        large = np.tile(IDS, 4_000)  # a reply of many frames
        np.testing.assert_array_equal(pin.lookup({"t": large})["t"], np.tile(rows["t"], (4_000, 1)))
        assert [one.version for one in remote.pins()] == [one.version for one in store.pins()] == [1]


def test_a_pin_that_the_server_knows_no_more(held: ExitStack) -> None:
    store, server = serve(held)
    with RemoteStore(server.address, 60) as remote:
        pin = remote.pin()
        address = server.address
        server.stop(0)
        assert store.pins() == ()  # with whoever served it
        with serving(store, address=address):
            for call in (
                lambda: pin.lookup({"t": IDS}),
                lambda: pin.row_count("t"),
                lambda: list(pin.scan("t")),
                lambda: pin.read_rows("t", IDS),
                lambda: pin.table_state("t"),
                pin.renew,
            ):
                with pytest.raises(StaleVersion, match="no such pin"):
                    call()
            pin.close()


def test_a_pin_that_cannot_be_released_says_so_once() -> None:
    with ExitStack() as held:
        _, server = serve(held)
        remote = held.enter_context(RemoteStore(server.address, 60))
        pin = remote.pin()
        server.stop(0)
        remote.connection.deadline_s = 1.0
        with pytest.raises(Unavailable, match=server.address):
            pin.close()
        pin.close()


def test_leases_and_tokens_that_cannot_be(held: ExitStack) -> None:
    store, server = serve(held)
    remote = held.enter_context(RemoteStore(server.address))
    with pytest.raises(BadInput, match="3600"):
        remote.pin(lease_s=7200)
    stub = store_pb2_grpc.StoreStub(remote.connection.channel)
    for request in (
        store_pb2.PinRequest(lease_s=5, token=b"short"),
        store_pb2.PinRequest(lease_s=-1, token=uuid.uuid4().bytes),
    ):
        with pytest.raises(BadInput, match=r"token|lease_s"):
            remote.connection.call(lambda timeout, request=request: stub.Pin(request, timeout=timeout))  # type: ignore[misc]
    assert store.pins() == ()


def test_tokens_of_pins_that_have_ended_are_forgotten(held: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_NAMED_S", 0.0)
    store = held.enter_context(MemoryStore(2))
    pins = service.ServedPins(store)

    class Context:
        def peer(self) -> str:
            return "ipv4:127.0.0.1:1"

    for _ in range(5):
        request = store_pb2.PinRequest(lease_s=0.001, token=uuid.uuid4().bytes)
        pins.pin(request, Context())  # type: ignore[arg-type]
        time.sleep(0.002)
    assert len(pins._pins) == 1


def _hold(pipe: Pipe, address: str, lease_s: float) -> None:
    remote = RemoteStore(address, 60)
    pin = remote.pin(lease_s=lease_s)
    pipe.send(pin.lookup({"t": int64(1)})["t"].tobytes())
    pipe.poll(600)


def test_what_a_killed_client_held_is_freed_after_its_lease(held: ExitStack) -> None:
    store, server = serve(held)
    with process(_hold, server.address, 3.0) as (_, pipe):
        row = heard(pipe)
        commit(store, {"t": update(IDS, 8)})
        (pin,) = store.pins()
        assert (pin.version, pin.rows) == (1, len(IDS))
        assert store.lookup({"t": int64(1)}, 1)["t"].tobytes() == row
    until(lambda: not store.pins())
    with pytest.raises(StaleVersion, match="lease of 3 s"):
        store.lookup({"t": int64(1)}, 1)
    assert not store._tables["t"].versions.pinned
