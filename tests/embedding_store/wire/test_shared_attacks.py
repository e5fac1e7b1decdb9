"""What a hostile process of the same host can do to shared rows: read them, if it is let in, and nothing else."""

from __future__ import annotations

import ctypes
import fcntl
import json
import logging
import mmap
import multiprocessing
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store import RemoteSource, RemoteStore, SharedMemoryStore, TableUpdate
from elastable.embedding_store.contract.spec import InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.errors import BadInput, StoreFailed
from elastable.embedding_store.native import id_index
from elastable.embedding_store.native.id_index import IdIndex
from elastable.embedding_store.support import memory_mapping
from elastable.embedding_store.wire.shared import attachment, sealed_memory
from elastable.embedding_store.wire.shared.attachment import CHANNEL, LAYOUT, NOTIFICATIONS, connected, receive_packet
from elastable.embedding_store.wire.shared.sealed_memory import SealedMemory
from elastable.embedding_store.wire.shared.shared_channel import SharedChannel, SharedChannels
from elastable.embedding_store.wire.shared.shared_source import Attachment, SharedSource, attached_tables
from tests.contracts.store_samples import commit, create_tables
from tests.embedding_store.serving import serving
from tests.waiting import until

pytestmark = pytest.mark.process

DIM = 8
WAIT_S = 60


def zeros(name: str, size: int | None = None) -> TableSpec:
    return TableSpec(name, DIM, size, initializer=InitializerSpec("zeros"), optimizer=OptimizerSpec.of("sgd"))


def train(store: SharedMemoryStore, *tables: str, ids: int = 100) -> None:
    ups = {table: TableUpdate(np.arange(ids), np.full((ids, DIM), -1, np.float32)) for table in tables}
    commit(store, ups, rate=1.0)


@pytest.fixture
def store() -> Iterator[SharedMemoryStore]:
    with create_tables(SharedMemoryStore(1), zeros("any")) as store:
        store.create_table(zeros("fixed", 100))
        train(store, "any", "fixed")
        yield store


def attached(held: ExitStack, store: SharedMemoryStore) -> SharedSource:
    server = held.enter_context(serving(store))
    return held.enter_context(SharedSource(RemoteSource(server.address, 60), threads=1, required=True))


def handed_out(store: SharedMemoryStore) -> list[int]:
    """Every descriptor that a process gets that says the token."""
    descriptors = []
    with connected(store.attachments.name) as notifications:
        notifications.send(store.attachments.token + NOTIFICATIONS)
        descriptors += receive_packet(notifications)[1]
    with connected(store.attachments.name) as layout:
        layout.send(store.attachments.token + LAYOUT)
        begin, _ = receive_packet(layout)
        for _ in range(begin["tables"]):
            descriptors += receive_packet(layout)[1]
    return descriptors


def memories() -> int:
    """How many descriptors of shared memory this process has open."""
    found = 0
    for other in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{other}").startswith("/memfd:elastable")
    return found


def open_descriptors(fd: int) -> int:
    """How many descriptors of this process are of the same file."""
    found = 0
    for other in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += os.path.samestat(os.stat(int(other)), os.fstat(fd))
    return found


@contextmanager
def few_descriptors(more: int) -> Iterator[int]:
    """So many more than are in use may be used; the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as filled:
        highest = max(map(int, os.listdir("/proc/self/fd")))
        # Numbers below that other tests left free would be given out first, and those above are over the limit then.
        while (lowest := os.dup(0)) <= highest:
            filled.callback(os.close, lowest)
        os.close(lowest)
        limit = lowest + more
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            yield limit
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_descriptor_that_is_handed_out_lets_anyone_write_shrink_or_empty_the_memory(
    store: SharedMemoryStore,
) -> None:
    descriptors = handed_out(store)
    assert len(descriptors) >= 4
    for handed in descriptors:
        again = os.open(f"/proc/self/fd/{handed}", os.O_RDONLY)
        try:  # root may open whatever the mode says; the seal holds nevertheless
            reopened = os.open(f"/proc/self/fd/{handed}", os.O_RDWR)
        except PermissionError:
            reopened = os.dup(again)
        for descriptor in (handed, again, reopened):
            changes = (
                lambda of=descriptor: os.pwrite(of, b"\xff" * 8, 0),
                lambda of=descriptor: mmap.mmap(of, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
                lambda of=descriptor: os.ftruncate(of, 0),
                lambda of=descriptor: os.ftruncate(of, 1 << 61),
                lambda of=descriptor: fcntl.fcntl(of, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
            )
            for change in changes:
                with pytest.raises(OSError, match=r"Errno|hung up"):
                    change()
            punch = ctypes.CDLL(None).fallocate(descriptor, 3, ctypes.c_long(0), ctypes.c_long(4096))
            assert punch == -1
        assert os.fstat(handed).st_mode & 0o777 == 0o400
        for descriptor in (handed, again, reopened):
            os.close(descriptor)
    train(store, "any", "fixed")
    assert (store.lookup({"any": np.arange(100)})["any"] == 2).all()


def test_without_seals_descriptors_are_still_for_reading(held: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = 1 << 20  # a seal that no kernel knows
    monkeypatch.setattr(sealed_memory, "_SEAL_SETS", (sealed_memory._SIZE_SEALS | unknown, sealed_memory._SIZE_SEALS))
    store = create_tables(held.enter_context(SharedMemoryStore(1)), zeros("any"))
    source = attached(held, store)
    for _ in range(3):
        train(store, "any", ids=50_000)
    assert (source.lookup({"any": np.arange(50_000)})["any"] == 3).all()
    for descriptor in handed_out(store):
        with pytest.raises(OSError, match=r"Errno|hung up"):
            mmap.mmap(descriptor, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match=r"Errno|hung up"):
            os.ftruncate(descriptor, 0)
        os.close(descriptor)


def come_as(user: int, name: str, token: bytes, said: multiprocessing.SimpleQueue[str]) -> None:
    os.setuid(user)
    try:
        Attachment(name, token).close()
    except OSError as error:
        said.put(type(error).__name__)
    else:
        said.put("let in")


def test_another_user_is_not_let_in(
    store: SharedMemoryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = 65_534
    if os.geteuid() == 0:

        def come() -> str:
            context = multiprocessing.get_context("fork")
            said = context.SimpleQueue()
            visitor = (stranger, store.attachments.name, store.attachments.token, said)
            child = context.Process(target=come_as, args=visitor)
            child.start()
            child.join(WAIT_S)
            return str(said.get())
    else:  # this process is the stranger to an owner that takes itself for somebody else
        stranger = os.geteuid()

        def come() -> str:
            monkeypatch.setattr(attachment.os, "geteuid", lambda: stranger + 1)  # type: ignore[attr-defined]
            try:
                with connected(store.attachments.name) as notifications:
                    notifications.send(store.attachments.token + NOTIFICATIONS)
                    receive_packet(notifications)
                    return "let in"
            except OSError as error:
                return type(error).__name__
            finally:
                monkeypatch.undo()

    with caplog.at_level(logging.WARNING):
        assert come() != "let in"
    assert "of user" in caplog.text or os.geteuid() != 0


@pytest.mark.parametrize("damage", ["positions", "groups", "ways", "state"])
def test_a_damaged_index_is_an_error_of_the_reader(held: ExitStack, store: SharedMemoryStore, damage: str) -> None:
    source = attached(held, store)
    assert (source.lookup({"any": np.arange(100)})["any"] == 1).all()
    index = store._tables["any"].directory
    assert isinstance(index, IdIndex)
    if damage == "positions":
        index._cells.array[:, 5:7] = np.uint64(0x7FFFFFFF_7FFFFFFF)
    elif damage == "groups":
        index._state[id_index.BITS] = 60
    elif damage == "ways":
        index._state[id_index.WAYS] = 1 << 40
    else:
        index._state[:] = -1
    with pytest.raises(StoreFailed, match="'any': its index in shared memory is damaged"):
        source.lookup({"any": np.arange(100)})
    assert source.attached
    assert (source.lookup({"fixed": np.arange(100)})["fixed"] == 1).all()


@contextmanager
def owner(answer: Callable[[socket.socket, bytes], None]) -> Iterator[tuple[str, bytes]]:
    name, token = f"elastable-test-{os.getpid()}-{threading.get_ident()}", bytes(16)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen(8)

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    answer(connection, connection.recv(64)[16:])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield name, token
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(WAIT_S)


def test_memory_that_could_shrink_under_its_reader_is_not_mapped() -> None:
    fd = os.memfd_create("elastable-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 20)

    def answer(connection: socket.socket, wish: bytes) -> None:
        socket.send_fds(connection, [b'{"board": true}'], [fd])

    with owner(answer) as (name, token), pytest.raises(OSError, match="not sealed against shrinking"):
        Attachment(name, token)
    with pytest.raises(OSError, match="not sealed against shrinking"):
        SharedChannels().add(os.dup(fd))
    assert open_descriptors(fd) == 1
    os.close(fd)


@pytest.mark.parametrize(
    "text", [b"[" * 60_000, b"[1]", b"\xff", b'{"spec": 3}', b'{"generation": 1}', b'{"generation": 1, "tables": "9"}']
)
def test_what_an_owner_says_is_not_believed(text: bytes) -> None:
    board = SealedMemory("board")

    def answer(connection: socket.socket, wish: bytes) -> None:
        if wish == NOTIFICATIONS:
            socket.send_fds(connection, [b"{}"], [board.fd])
            connection.recv(1)  # until the other side hangs up
        else:
            connection.send(text)

    def ask(name: str, token: bytes) -> None:
        attachment = Attachment(name, token)
        attachment._notifications.shutdown(socket.SHUT_WR)
        try:
            attachment._layout(7)
        finally:
            attachment.close()

    with owner(answer) as (name, token), pytest.raises(StoreFailed, match="owner of shared rows"):
        ask(name, token)


def test_slabs_that_do_not_lie_in_the_memory_are_refused(store: SharedMemoryStore) -> None:
    with connected(store.attachments.name) as layout:
        layout.send(store.attachments.token + LAYOUT)
        receive_packet(layout)
        packet, descriptors = receive_packet(layout)
    for part, place, value, wrong in (
        ("directory", 0, -1, "malformed"),
        ("directory", 0, 1 << 61, "malformed"),
        ("directory", 2, "|O", "malformed"),
        ("directory", 3, 9, "descriptors came"),
        ("values", 4, 4096, "malformed"),
        ("values", 4, 1 << 50, "were announced"),
    ):
        changed = json.loads(json.dumps(packet))
        changed[part][0][place] = value

        def answer(connection: socket.socket, wish: bytes, said: dict[str, object] = changed) -> None:
            connection.send(b'{"generation": 1, "tables": 1}')
            socket.send_fds(connection, [json.dumps(said).encode()], descriptors)

        with owner(answer) as (name, token), connected(name) as connection, pytest.raises(StoreFailed, match=wrong):
            attached_tables(connection, token)
    for descriptor in descriptors:
        os.close(descriptor)


def test_more_tables_do_not_take_more_descriptors(held: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    store = held.enter_context(SharedMemoryStore(1))
    source = attached(held, store)
    names = [f"t{number}" for number in range(250)]
    with few_descriptors(200), caplog.at_level(logging.WARNING):
        before = memories()
        for name in names:
            store.create_table(zeros(name))
        assert memories() - before < 130
        assert caplog.text.count("ulimit -n") == 1
        train(store, *names, ids=3)
        with RemoteSource(source._remote.address, 60) as another:  # the server still lets clients in
            assert another.version() == 1
        rows = source.lookup({name: np.arange(3) for name in names}, 1)
        assert source.attached
        assert all((found == 1).all() for found in rows.values())


def test_more_tables_than_the_system_maps_memory_for_are_refused(
    held: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that the system refused a range ended by a signal as it compiled, at half of the tables there may be."""
    store = held.enter_context(SharedMemoryStore(1))
    client = held.enter_context(RemoteStore(held.enter_context(serving(store, writable=True)).address, 60))
    client.create_table(zeros("t"))
    train(store, "t", ids=3)  # whatever is compiled is
    room, begun, before = 400, memory_mapping._RANGES * len(memory_mapping._reserved), mapped_ranges()
    monkeypatch.setattr(memory_mapping, "most_ranges", lambda: -(-(begun + room) // 3) * 4)
    made: list[str] = []

    def fill() -> None:
        for number in range(room):
            client.create_table(zeros(f"t{number}"))
            made.append(f"t{number}")

    with pytest.raises(BadInput, match=r"as many as the system maps memory for \(sysctl vm.max_map_count\)"):
        fill()
    assert room / 2 < mapped_ranges() - before < room + 50, "it is known without looking how many there are"
    assert not client.create_table(zeros(made[0])), "what is there is there"
    train(store, *made, ids=3)
    client.drop_table(made[0])
    assert client.create_table(zeros("another"))


def mapped_ranges() -> int:
    return Path("/proc/self/maps").read_text().count("\n")


def test_a_process_without_a_descriptor_left_is_warned_too(held: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    store = held.enter_context(SharedMemoryStore(1))
    with few_descriptors(0), caplog.at_level(logging.WARNING):
        store.create_table(zeros("t"))
    assert caplog.text.count("ulimit -n") == 1


def test_memory_that_tables_share_is_empty_when_the_next_table_gets_it(held: ExitStack) -> None:
    store = held.enter_context(SharedMemoryStore(1))
    source = attached(held, store)
    with few_descriptors(10):
        used = []
        for round_ in range(16):
            for name in ("a", "b", "c"):
                store.create_table(zeros(name))
            assert not any(rows.any() for rows in source.lookup({n: np.arange(5_000) for n in "abc"}).values())
            train(store, "a", "b", "c", ids=5_000)
            rows = source.lookup({name: np.arange(5_000) for name in "abc"}, round_ + 1)
            assert source.attached
            assert all((found == 1).all() for found in rows.values())
            for name in ("a", "b", "c"):
                store.drop_table(name)
            used.append(sum(os.fstat(memory.fd).st_blocks for memory in store._slabs._common))
        # Whoever makes pages huge may hold dropped tables for a moment, and the next ones then get other places.
        assert used[-1] <= used[1] * 3, used


def test_a_silent_process_at_the_door_keeps_nobody_waiting_and_leaves_nothing(store: SharedMemoryStore) -> None:
    def served() -> int:
        """Sockets of this process that are the door, or a connection that came through it."""
        return Path("/proc/net/unix").read_text().count(f"@{store.attachments.name}\n")

    with ExitStack() as silent:
        for _ in range(8):
            silent.enter_context(connected(store.attachments.name))
        attachment = Attachment(store.attachments.name, store.attachments.token, 1)
        assert attachment.version() == 1
        attachment.close()
        until(lambda: served() == 9)
    with Attachment(store.attachments.name, store.attachments.token, 1)._notifications:
        pass
    until(lambda: served() == 1)


def test_descriptors_that_nobody_asked_for_are_closed(store: SharedMemoryStore) -> None:
    fd = os.memfd_create("elastable-test", os.MFD_ALLOW_SEALING)
    asked_for = open_descriptors(fd)
    for wish in (NOTIFICATIONS, LAYOUT, CHANNEL, b"?"):
        for _ in range(4):
            with connected(store.attachments.name) as connection:
                socket.send_fds(connection, [bytes(16) + wish], [fd, fd])
                assert not connection.recv(1)
    # Threads of earlier tests in this process may open and close others.
    assert open_descriptors(fd) == asked_for == 1
    os.close(fd)


def test_more_processes_than_descriptors_are_set_aside_for_are_refused(store: SharedMemoryStore) -> None:
    store.attachments.most = 2
    kept = [Attachment(store.attachments.name, store.attachments.token, 1) for _ in range(2)]
    with pytest.raises(OSError, match=r"Errno|hung up"):
        Attachment(store.attachments.name, store.attachments.token, 1)
    boxes = [SharedChannel(store.attachments.name, store.attachments.token) for _ in range(2)]
    with pytest.raises(OSError, match=r"Errno|hung up"):
        SharedChannel(store.attachments.name, store.attachments.token)
    assert kept[0].version() == 1
    for end in (*kept, *boxes):
        end.close()
