"""Rows read from another process' memory: one state whole, whatever the owner does, and whoever dies."""

import errno
import gc
import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store import EmbeddingStore, MemoryStore, RemoteSource, TableUpdate
from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.errors import TableNotFound, Unauthenticated, Unsupported
from elastable.embedding_store.tables.lookups import Bags, lookup_request
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.service.store_service import store_service
from elastable.embedding_store.wire.shared import shared_store
from elastable.embedding_store.wire.shared.attachment import NOTIFICATIONS, connected, receive_packet
from elastable.embedding_store.wire.shared.sealed_memory import SealedMemory
from elastable.embedding_store.wire.shared.shared_source import Attachment, Detached, SharedSource
from elastable.embedding_store.wire.shared.shared_store import SharedMemoryStore, SharedSlab
from tests.certificates import Authority
from tests.contracts.store_contract import StoreContract
from tests.contracts.store_samples import MakeStore, commit, create_tables, dynamic, fixed, int64, update
from tests.embedding_store.serving import serving
from tests.embedding_store.wire.test_shared_attacks import few_descriptors, owner
from tests.waiting import until


class ReadAttached(SharedMemoryStore):
    """A store whose rows are read as another process reads them."""

    def __init__(self, direct_bytes: int) -> None:
        super().__init__(2, direct_bytes=direct_bytes)
        self.server = serving(self)
        self.source = SharedSource(RemoteSource(self.server.address, 60), threads=2, required=True)

    def lookup(self, ids: Mapping[str, Int64], version: int | None = None) -> dict[str, Float32]:
        if threading.current_thread().name.startswith("grpc"):  # the source asks for what it has no memory of
            return super().lookup(ids, version)
        rows = self.source.lookup(ids, version)
        assert self.source.attached or self._closed
        return rows

    def close(self) -> None:
        super().close()
        self.source.close()
        self.server.stop(0)


class TestAttachedMemory(StoreContract):
    @pytest.fixture(params=[1 << 30, 0], ids=["direct", "indexed"])
    def make_store(self, request: pytest.FixtureRequest) -> MakeStore:
        return lambda: ReadAttached(request.param)


def served(held: ExitStack, store: EmbeddingStore, writable: bool = False) -> RemoteSource:
    held.enter_context(store)
    server = held.enter_context(serving(store, writable))
    return held.enter_context(RemoteSource(server.address, 60))


def same_rows(one: Mapping[str, Float32], other: Mapping[str, Float32]) -> None:
    assert one.keys() == other.keys()
    for table, rows in one.items():
        np.testing.assert_array_equal(rows, other[table])


def mapped() -> set[str]:
    """The shared rows that this process has mapped, but for those of objects that nobody holds: inodes."""
    gc.collect()
    return set(re.findall(r"(\d+)\s+/memfd:elastable-", Path("/proc/self/maps").read_text()))


def test_bags_and_callers_memory(held: ExitStack) -> None:
    store = SharedMemoryStore(2)
    source = held.enter_context(SharedSource(served(held, store), required=True))
    store.create_table(dynamic())
    commit(store, {"people": update(np.arange(50), 5)})
    wanted = Bags(np.arange(100).reshape(25, 4), "mean")
    outs = [np.empty((25, 5), np.float32) for _ in range(2)]
    for each, out in zip((store, source), outs, strict=True):
        each.lookup_into([lookup_request(dynamic(), wanted, out)], version=1)
    assert source.attached
    np.testing.assert_array_equal(outs[0], outs[1])


def test_versions_are_waited_for(held: ExitStack) -> None:
    store = SharedMemoryStore(2)
    source = held.enter_context(SharedSource(served(held, store), required=True))
    store.create_table(fixed())
    assert not source.wait_for_version(1, 0.02)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(source.lookup_when, {"cities": int64(1)}, version, 30.0) for version in (1, 2, 1)]
        waited = pool.submit(source.wait_for_version, 2, 30.0)
        commit(store, {"cities": update(int64(1), 4)})
        for place in (0, 2):
            same_rows(asked[place].result(timeout=60), store.lookup({"cities": int64(1)}))
        commit(store, {"cities": update(int64(1), 4)})
        assert waited.result(timeout=60)
        same_rows(asked[1].result(timeout=60), store.lookup({"cities": int64(1)}))
    assert source.version() == 2


def test_tables_come_grow_are_cleared_and_go_while_they_are_attached(held: ExitStack) -> None:
    store = SharedMemoryStore(2)
    source = held.enter_context(SharedSource(served(held, store), required=True))
    everything = np.arange(200_000)

    def same() -> None:
        same_rows(source.lookup({"t": everything}), store.lookup({"t": everything}))
        assert source.attached

    spec = TableSpec("t", 16, optimizer=OptimizerSpec.of("sgd", learning_rate=0.5))
    store.create_table(spec)
    same()
    for count in (10, 5_000, 150_000):
        commit(store, {"t": TableUpdate(everything[:count], np.ones((count, 16), np.float32))})
        same()
    store.delete("t", everything[::3].copy())
    same()
    store.clear("t")
    same()
    commit(store, {"t": TableUpdate(everything, np.ones((200_000, 16), np.float32))})
    same()
    store.drop_table("t")
    with pytest.raises(TableNotFound):
        source.lookup({"t": int64(1)})
    store.create_table(TableSpec("t", 3))
    same()


def test_a_store_that_is_closed_gives_its_memory_back_and_another_is_attached(held: ExitStack) -> None:
    before = mapped()
    first, second = SharedMemoryStore(1), SharedMemoryStore(1)
    for store in (first, second):
        store.create_table(fixed())
    server = serving(first)
    source = held.enter_context(SharedSource(RemoteSource(server.address, 60), required=True))
    source.lookup({"cities": int64(1)})
    assert source.attached
    assert mapped() - before
    first.close()
    server.stop(0)
    with second, serving(second, address=server.address):
        commit(second, {"cities": update(int64(1), 4)})
        same_rows(source.lookup({"cities": int64(1)}, 1), second.lookup({"cities": int64(1)}))
        assert source.version() == 1
        assert source.attached
        source.close()
        source.close()
    del first, second, store, server
    until(lambda: mapped() <= before)  # threads of gRPC let go of what they served when they end


def test_a_store_without_shared_memory_is_asked_over_grpc(held: ExitStack) -> None:
    store = MemoryStore()
    remote = served(held, store)
    store.create_table(fixed())
    with pytest.raises(Unsupported, match="are not in shared memory"):
        SharedSource(remote, required=True)
    source = held.enter_context(SharedSource(remote))
    same_rows(source.lookup({"cities": int64(5)}), store.lookup({"cities": int64(5)}))
    assert not source.attached
    store.reset_version(3)
    assert source.wait_for_version(3, 10)
    assert source.version() == 3


def test_another_network_or_a_wrong_token_is_refused(held: ExitStack) -> None:
    store = held.enter_context(SharedMemoryStore(1))
    with pytest.raises(OSError, match="refused"):
        Attachment("elastable-of-nobody", store.attachments.token)
    with pytest.raises(ConnectionError, match="hung up"):
        Attachment(store.attachments.name, bytes(16))


def test_without_descriptors_tables_are_read_over_grpc(held: ExitStack) -> None:
    store = SharedMemoryStore(1)
    source = held.enter_context(SharedSource(served(held, store), required=True))
    with few_descriptors(0):
        store.create_table(fixed())
    store.create_table(dynamic())
    ids = {"cities": int64(1), "people": int64(2)}
    same_rows(source.lookup(ids), store.lookup(ids))
    assert source.attached


def test_rows_of_an_owner_that_hung_up_are_not_read(held: ExitStack) -> None:
    """Its memory stays mapped, and nothing in there says that nobody changes it any more."""
    store = held.enter_context(SharedMemoryStore(1))
    real = held.enter_context(connected(store.attachments.name))
    real.send(store.attachments.token + NOTIFICATIONS)
    _, boards = receive_packet(real)

    def answer(connection: socket.socket, wish: bytes) -> None:  # and then it hangs up
        socket.send_fds(connection, [b"{}"], boards)

    with owner(answer) as (name, token), closing(Attachment(name, token)) as attachment, pytest.raises(Detached):
        until(lambda: attachment.version() is None)
    for board in boards:
        os.close(board)


def test_what_is_in_use_moves_to_huge_pages_and_stays_what_it_is() -> None:
    extent = SealedMemory("weights").extent()
    assert extent is not None
    slab = SharedSlab(extent, 40_000, 64, np.float32)
    slab.array[:20_000] = np.arange(20_000)[:, None]
    assert sum(1 for _ in slab.make_huge()) == 3  # the last of them for the half of it that is in use
    assert list(slab.make_huge()) == []
    assert (slab.array[:20_000] == np.arange(20_000)[:, None]).all()
    assert not slab.array[20_000:].any()
    before = slab.array
    slab.grow(1_000_000)
    assert (slab.array[:20_000] == before[:20_000]).all()
    assert slab.array.shape == (1_000_000, 64)


@pytest.mark.parametrize(("number", "lives_on"), [(errno.EAGAIN, True), (errno.ENOMEM, True), (errno.EINVAL, False)])
def test_huge_pages_are_asked_for_until_one_is(monkeypatch: pytest.MonkeyPatch, number: int, lives_on: bool) -> None:
    asked = threading.Semaphore(0)

    def make_huge(self: SharedSlab) -> Iterator[None]:
        asked.release()
        raise OSError(number, os.strerror(number))
        yield

    monkeypatch.setattr(SharedSlab, "make_huge", make_huge)
    monkeypatch.setattr(shared_store, "_HUGE_EVERY_S", 0.001)
    monkeypatch.setattr(shared_store, "_HUGE_LATEST_S", 0.004)
    with create_tables(SharedMemoryStore(), TableSpec("t", 8, 100, optimizer=OptimizerSpec.of("sgd"))) as store:
        assert asked.acquire(timeout=60)
        if lives_on:
            assert all(asked.acquire(timeout=60) for _ in range(4))
        else:
            store._tidier.join(60)
        assert store._tidier.is_alive() == lives_on
    assert not store._tidier.is_alive()


IDS = np.arange(5_000)


def test_memory_is_shared_with_those_who_may_call(ours: Authority) -> None:
    credentials = ours.mutual()
    store = create_tables(SharedMemoryStore(2), TableSpec("t", 4))
    with store, GrpcServer("127.0.0.1:0", [store_service(store)], credentials=credentials) as server:
        with SharedSource(RemoteSource(server.address, 60, credentials), required=True) as source:
            assert source.attached
            np.testing.assert_array_equal(source.lookup({"t": IDS})["t"], store.lookup({"t": IDS})["t"])
        with RemoteSource(server.address, 60, replace(credentials, token=None)) as stranger:
            with pytest.raises(Unauthenticated):
                SharedSource(stranger, required=True)
            with SharedSource(stranger) as source, pytest.raises(Unauthenticated):
                source.lookup({"t": IDS})
