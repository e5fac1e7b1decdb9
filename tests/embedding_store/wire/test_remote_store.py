"""A store in another process keeps the store contract; what it is asked twice counts once."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import ClassVar

import grpc
import numpy as np
import pytest

from elastable.embedding_store import (
    Commit,
    EmbeddingStore,
    IndexedSlices,
    MemoryStore,
    RemoteStore,
    RowBlock,
    TableUpdate,
    errors,
)
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.wire.access.credentials import Role
from elastable.embedding_store.wire.messages.store_messages import STORE_SERVICE, block_frames
from elastable.embedding_store.wire.server.grpc_server import GrpcServer, Service
from elastable.embedding_store.wire.server.handlers import behaviour_of, with_behaviour
from tests.contracts.store_contract import StoreContract
from tests.contracts.store_history import HOSTILE, History, spoiled
from tests.contracts.store_samples import MakeStore, commit, create_tables, dynamic, fixed, int64, rows_by_id, update
from tests.embedding_store.serving import client_service, serving
from tests.untyped import Keywords

THREE = np.ones((3, 2), np.float32)
SQUARED: Keywords = {"ids": int64(1, 2, 3), "gradients": THREE}


def serve(held: ExitStack, writable: bool = True) -> tuple[MemoryStore, GrpcServer]:
    store = held.enter_context(MemoryStore(threads=2))
    server = held.enter_context(serving(store, writable))
    return store, server


class OfClients(History):
    """What a server refuses of its clients, and takes from its own process."""

    hostile: ClassVar = {
        **HOSTILE,
        "last version": (lambda commit: replace(commit, version=2**63 - 1), errors.BadInput),
        "repeated extreme ids": (spoiled("dynamic", ids=int64(-(2**63), 7, -(2**63)), gradients=THREE), errors.BadIds),
        "gradient infinite": (spoiled("admitted", ids=int64(1, 2, 3), gradients=THREE * np.inf), errors.NotFinite),
        "squares NaN": (spoiled("dynamic", **SQUARED, row_squares=THREE[:, 0] * np.nan), errors.NotFinite),
        "squares below 0": (spoiled("dynamic", **SQUARED, row_squares=-THREE[:, 0]), errors.BadGradient),
    }


class TestRemoteStore(StoreContract):
    history = OfClients
    times = 1

    @pytest.fixture
    def make_store(self, held: ExitStack) -> MakeStore:
        return lambda: open_store(f"grpc://{serve(held)[1].address}")

    def test_put_keeps_what_training_made(self, store: EmbeddingStore) -> None:
        """Which a parameter server does not: it believes no client."""
        with pytest.raises(errors.NotFinite, match="weight of id 1"):
            super().test_put_keeps_what_training_made(store)


def losing(service: Service, *methods: str) -> Service:
    """The service, the first answer of each method lost after its work was done."""
    lost = set(methods)

    def behind(name: str, behaviour: Callable[..., object]) -> Callable[..., object]:
        def answer(request: object, context: grpc.ServicerContext) -> object:
            reply = behaviour(request, context)
            if name in lost:
                lost.remove(name)
                context.abort(grpc.StatusCode.UNAVAILABLE, "the answer was lost")
            return reply

        return answer

    handlers = {
        name: with_behaviour(handler, behind(name, behaviour_of(handler))) if name in methods else handler
        for name, handler in service.handlers.items()
    }
    return Service(service.name, handlers, waiting=service.waiting)


def test_calls_whose_answer_was_lost_count_once() -> None:
    methods = ("PushRows", "DropTable", "Put", "CreateTable", "ResetVersion", "Pin")
    with MemoryStore() as store, MemoryStore() as model:
        service = losing(client_service(store), *methods)
        with (
            GrpcServer("127.0.0.1:0", [service], anonymous=Role.ADMINISTRATOR) as server,
            RemoteStore(server.address, 60) as remote,
        ):
            spec = dynamic(optimizer=OptimizerSpec.of("adam"))
            for each in (remote, model):
                each.create_table(spec)
                commit(each, {"people": update(int64(1, -2), 5)})
                assert each.version() == 1
                each.stage(Commit(2, {"people": update(int64(1, 7), 5, seed=3)}, 7, {}))()
                assert each.version() == 2
            assert rows_by_id(store, "people") == rows_by_id(model, "people")
            pin = remote.pin(lease_s=90)
            assert len(store.pins()) == 1
            pin.renew(300)
            assert [one.lease_left_s > 100 for one in store.pins()] == [True]
            pin.close()
            assert store.pins() == ()
            blocks = list(remote.scan("people"))
            remote.clear("people")
            remote.put("people", blocks)
            assert rows_by_id(store, "people") == rows_by_id(model, "people")
            remote.reset_version(9)
            assert store.version() == 9
            remote.drop_table("people")
            with pytest.raises(errors.TableNotFound):
                remote.drop_table("people")


def test_large_commits_blocks_and_scans_take_many_frames(held: ExitStack) -> None:
    _, server = serve(held)
    with MemoryStore() as model, RemoteStore(server.address, 60) as remote:
        for each in (model, remote):
            each.create_table(TableSpec("t", 64, optimizer=OptimizerSpec.of("adagrad")))
            commit(each, {"t": update(np.arange(30_000) * 7, 64)})
        theirs, ours = (each.read_rows("t", np.arange(40_000)[::-1]) for each in (model, remote))
        for name in ("ids", "weights", "slots"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        copies = list(remote.scan("t", 9_000))
        assert [len(block.ids) for block in copies] == [9_000, 9_000, 9_000, 3_000]
        remote.clear("t")
        remote.put("t", copies)
        assert rows_by_id(remote, "t") == rows_by_id(model, "t")


def test_clients_in_turn_update_tables_whatever_versions_they_know(held: ExitStack) -> None:
    _, server = serve(held)
    one, other = (held.enter_context(RemoteStore(server.address, 60)) for _ in range(2))
    slices = IndexedSlices(np.ones((1, 4), np.float32), int64(1))
    tables = [store.table(fixed()) for store in (one, other)]
    assert [table.update(None, slices) for table in (*tables, *tables)] == [1, 2, 3, 4]
    other.reset_version(0)  # which `one` does not know
    assert [table.update(None, slices) for table in tables] == [1, 2]


def test_a_fork_is_another_client(held: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the memory of the thread that forked, and with it the number of the last push."""
    store, server = serve(held)
    remote = held.enter_context(RemoteStore(server.address, 60))
    table = remote.table(fixed())
    slices = IndexedSlices(np.ones((1, 4), np.float32), int64(1))
    table.update(None, slices)
    names = [remote._next_name()[0]]
    monkeypatch.setattr(os, "getpid", lambda: 1)
    names += [remote._next_name()[0] for _ in range(2)]
    assert names[0] != names[1] == names[2]
    assert table.update(None, slices) == store.version() == 2


def test_a_push_that_a_later_one_overtook_is_an_error(held: ExitStack) -> None:
    store, server = serve(held)
    remote = held.enter_context(RemoteStore(server.address, 60))
    table = remote.table(fixed())
    finish = remote.stage(Commit(1, {"cities": update(int64(1), 4)}, 0, {}))
    table.update(None, IndexedSlices(np.ones((1, 4), np.float32), int64(2)))
    with pytest.raises(errors.StoreFailed, match="this one counts no more"):
        finish()
    assert (store.version(), store.row_count("cities")) == (1, 1)


WRITES: dict[str, Callable[[RemoteStore], object]] = {
    "CreateTable": lambda remote: remote.create_table(dynamic()),
    "PushRows": lambda remote: commit(remote, {"cities": update(int64(1), 4)}),
    "Put": lambda remote: remote.put("cities", remote.scan("cities")),
    "DropTable": lambda remote: remote.drop_table("cities"),
    "ResetVersion": lambda remote: remote.reset_version(3),
}


def test_a_masters_store_is_only_read_from(held: ExitStack) -> None:
    store, server = serve(held, writable=False)
    store.create_table(fixed())
    commit(store, {"cities": update(int64(1), 4)})
    before = rows_by_id(store, "cities")
    with RemoteStore(server.address, 60) as remote:
        for call, write in WRITES.items():
            with pytest.raises(errors.Unsupported, match=f"{call}: .*only read from"):
                write(remote)
        assert rows_by_id(remote, "cities") == before
    assert (store.version(), list(store.specs())) == (1, ["cities"])


def test_what_the_wire_has_no_place_for_is_refused_by_table(held: ExitStack) -> None:
    _, server = serve(held)
    ones = np.ones((1, 4), np.float32)
    with create_tables(RemoteStore(server.address, 60), fixed()) as remote:
        with pytest.raises(errors.SpecConflict, match="dim"):
            remote.create_table(fixed(dim=5))
        for block in (RowBlock(int64(1), ones.astype(float), ones[:, :0]), RowBlock(int64(1, 2), ones, ones[:, :0])):
            with pytest.raises(errors.BadInput, match="'cities': weights"):
                remote.put("cities", [block])
        with pytest.raises(errors.BadGradient, match="'cities': row_squares"):
            remote.commit(Commit(1, {"cities": TableUpdate(int64(1), ones, np.ones(3, np.float32))}, 0, {}))
        assert (remote.version(), remote.row_count("cities")) == (0, 0)


def test_a_scan_that_does_not_go_on_is_left_at_the_deadline() -> None:
    block = RowBlock(int64(1), np.ones((1, 2), np.float32), np.ones((1, 0), np.float32))

    def scan(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from block_frames("t", block)
        gone = threading.Event()
        context.add_callback(gone.set)
        gone.wait(60)

    service = Service(STORE_SERVICE, {"ReadRows": grpc.unary_stream_rpc_method_handler(scan)})
    with GrpcServer("127.0.0.1:0", [service]) as server, RemoteStore(server.address, deadline_s=5) as remote:
        blocks = remote.scan("t")
        assert next(blocks).ids.tolist() == [1]
        with pytest.raises(errors.Unavailable, match=r"deadline of 5 s"):
            next(blocks)


@pytest.mark.parametrize("body", [b"\x12\x01a", b"\x0a\x02\xff\xff"])
def test_a_scan_that_makes_no_sense_is_a_failure(body: bytes) -> None:
    scan = grpc.unary_stream_rpc_method_handler(lambda request, context: iter([body]))
    with (
        GrpcServer("127.0.0.1:0", [Service(STORE_SERVICE, {"ReadRows": scan})]) as server,
        RemoteStore(server.address, 60) as remote,
        pytest.raises(errors.StoreFailed, match="malformed"),
    ):
        next(remote.scan("t"))
