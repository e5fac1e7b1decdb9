"""Gradients that a worker lays down in memory of its own: the same pushes, once each, whoever dies."""

import contextlib
import fcntl
import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadInput, Unavailable, Unsupported
from elastable.embedding_store.shards.server_contract import Slices
from elastable.embedding_store.support.array_body import BodyPlan
from elastable.embedding_store.wire.messages.frames import FrameReader
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.service.store_service import store_service
from elastable.embedding_store.wire.shared import attachment
from elastable.embedding_store.wire.shared.attachment import CHANNEL, connected
from elastable.embedding_store.wire.shared.shared_channel import SharedChannel, SharedChannels, SharedMessage
from elastable.embedding_store.wire.shared.shared_store import SharedMemoryStore, channels_of
from elastable.master.api import Push, SyncPushId, WorkerIdentity
from elastable.master.rpc.client import MasterClient
from elastable.master.rpc.master_service import master_service
from elastable.master.rpc.messages import push_frames, push_from_frames
from elastable.master.v1 import master_pb2
from tests.master.rpc.test_client import Scripted
from tests.master.rpc.test_messages import assert_same
from tests.waiting import until

WAIT_S = 60


def push(rows: int, seed: int = 0) -> Push:
    random = np.random.default_rng(seed)
    slices = {
        "users": Slices(random.integers(0, 2**62, rows), random.standard_normal((rows, 17), np.float32)),
        "items": Slices(np.empty(0, np.int64), np.empty((0, 4), np.float32)),
    }
    dense = (random.standard_normal((3, 5), np.float32), np.array(2.5, np.float32))
    rest: dict[str, object] = {"states": (np.arange(7),), "metrics": (np.ones(2),)}
    return Push(SyncPushId(3, seed), 64, dense=dense, slices=slices, job="job", **rest)  # type: ignore[arg-type]


@pytest.fixture
def store() -> Iterator[SharedMemoryStore]:
    with SharedMemoryStore(1) as store:
        yield store


@pytest.fixture
def channel(store: SharedMemoryStore) -> Iterator[SharedChannel]:
    channel = SharedChannel(store.attachments.name, store.attachments.token)
    yield channel
    channel.close()


def test_what_is_laid_down_is_what_is_read(store: SharedMemoryStore, channel: SharedChannel) -> None:
    for seed, rows in enumerate((5_000, 1, 60_000, 2_000, 0, 200_000)):  # the memory grows twice
        wanted = push(rows, seed)
        frames = list(push_frames(wanted, channel))
        body = sum(slices.values.nbytes for slices in wanted.slices.values())
        assert len(frames) == 1
        assert (len(frames[0]) < body) is (body > 1 << 17)  # what is small goes in the frame
        assert_same(push_from_frames(frames, store.channels), wanted)


def test_what_was_read_stays_when_the_next_is_laid_down(store: SharedMemoryStore, channel: SharedChannel) -> None:
    read = push_from_frames(push_frames(push(9_000, 1), channel), store.channels)
    list(push_frames(push(9_000, 2), channel))
    assert_same(read, push(9_000, 1))


def test_a_late_reader_does_not_take_the_next_message(store: SharedMemoryStore, channel: SharedChannel) -> None:
    late = list(push_frames(push(9_000, 1), channel))
    list(push_frames(push(9_000, 2), channel))
    with pytest.raises(BadInput, match="no longer holds message 1"):
        push_from_frames(late, store.channels)


def test_a_message_in_memory_and_a_body_are_too_much(store: SharedMemoryStore, channel: SharedChannel) -> None:
    (frame,) = push_frames(push(9_000), channel)
    with pytest.raises(BadInput, match="longer than the 0 bytes"):
        push_from_frames([frame, b"\x12\x01x"], store.channels)


def test_a_message_longer_than_its_channel_is_refused(store: SharedMemoryStore, channel: SharedChannel) -> None:
    message = channel.put([np.zeros(10)])
    plan = BodyPlan("GradientFrame")
    plan.add("values", (1 << 20,), np.dtype(np.float64))
    with pytest.raises(BadInput, match=rf"channel {channel.number} has room for \d+ bytes.* header .* 8388608"):
        store.channels.read(message, plan)


def test_an_outbox_is_forgotten_with_its_sender(store: SharedMemoryStore) -> None:
    channel = SharedChannel(store.attachments.name, store.attachments.token)
    message, plan = channel.put([np.arange(3)]), BodyPlan("GradientFrame")
    plan.add("values", (3,), np.dtype(np.int64))
    assert store.channels.read(message, plan)[0].tolist() == [0, 1, 2]
    door = f"@{store.attachments.name}\n"
    assert Path("/proc/net/unix").read_text().count(door) == 2  # it listens, and has let this one in
    assert open_descriptors([channel._fd]) == 2
    channel.close()

    def gone() -> bool:
        try:
            store.channels.read(message, plan)
        except Unsupported as error:
            return bool(re.search(f"channel {message.channel} is not known here", str(error)))
        return False

    until(gone)
    until(lambda: open_descriptors([channel._fd]) == Path("/proc/net/unix").read_text().count(door) == 1)
    with pytest.raises(Unsupported):
        SharedChannels().read(SharedMessage(1, 1), plan)


def open_descriptors(of: Sequence[int]) -> int:
    """How many descriptors of this process show what one of these shows. (Other threads open and close theirs.)"""
    files = {os.fstat(descriptor)[1:3] for descriptor in of}
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it has been closed since
            found += os.fstat(int(name))[1:3] in files
    return found


def test_memory_that_can_shrink_is_not_taken(store: SharedMemoryStore, tmp_path: Path) -> None:
    unsealed = os.memfd_create("elastable-test", os.MFD_ALLOW_SEALING)
    os.truncate(unsealed, 1 << 20)
    short = os.memfd_create("elastable-test", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(short, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    ours = (unsealed, short, file)
    for descriptor in ours:
        with connected(store.attachments.name) as connection:
            socket.send_fds(connection, [store.attachments.token + CHANNEL], [descriptor])
            assert connection.recv(100) == b""
    with connected(store.attachments.name) as connection:  # who does not know the token hands nothing over
        socket.send_fds(connection, [bytes(len(store.attachments.token)) + CHANNEL], [unsealed])
        assert connection.recv(100) == b""
    until(lambda: open_descriptors(ours) == len(ours))
    for descriptor in ours:
        os.close(descriptor)


# -- over a real server


class Heard(Scripted):
    """A master that keeps the pushes it gets."""

    def pushes(self) -> list[Push]:
        return [said[1] for said in self.asked if said[0] == "push"]  # type: ignore[misc]


def served(held: ExitStack, master: Scripted, store: MemoryStore, address: str = "127.0.0.1:0") -> GrpcServer:
    held.enter_context(store)
    return held.enter_context(GrpcServer(address, [master_service(master, channels_of(store)), store_service(store)]))


def sharing_client(held: ExitStack, server: GrpcServer) -> MasterClient:
    client = held.enter_context(MasterClient(server.address, deadline_s=WAIT_S))
    client.join(WorkerIdentity("w"))
    client.share_memory()
    return client


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the frames of each push that a server has read."""
    read = list[int]()
    original = FrameReader.header

    def header(self: FrameReader, kind: type[master_pb2.GradientHeader]) -> master_pb2.GradientHeader:
        if kind is master_pb2.GradientHeader:
            read.append(len(self._body))
        return original(self, kind)

    monkeypatch.setattr(FrameReader, "header", header)
    return read


def test_a_client_lays_down_what_it_reports(sizes: list[int], held: ExitStack) -> None:
    master = Heard()
    server = served(held, master, SharedMemoryStore(1))
    client = held.enter_context(MasterClient(server.address, deadline_s=WAIT_S))
    client.join(WorkerIdentity("w"))
    client.report_gradient(push(20_000, 1))
    client.share_memory()
    for seed in range(2, 6):
        client.report_gradient(push(20_000, seed))
    for seed, found in enumerate(master.pushes(), 1):
        assert_same(found, push(20_000, seed))
    assert sizes[0] > 1 << 20
    assert sizes[1:] == [0] * 4


def test_a_master_that_shares_no_memory_gets_frames_and_that_is_said_once(
    sizes: list[int], held: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attachment, "_LOOK_AGAIN_S", 0.0)  # each call tries again
    caplog.set_level("INFO", attachment.__name__)
    master = Heard()
    server = served(held, master, MemoryStore(1))
    client = sharing_client(held, server)
    client.report_gradient(push(20_000, 1))
    client.report_gradient(push(20_000, 2))
    assert len(master.pushes()) == 2
    assert min(sizes) > 1 << 20
    (line,) = caplog.messages
    assert re.match(f"gradients go to {server.address} over gRPC: .*shared memory", line)


def test_a_master_that_begins_anew_is_sent_what_it_cannot_read(sizes: list[int]) -> None:
    with ExitStack() as held:
        first, second = Heard(), Heard()
        with ExitStack() as past:
            server = served(past, first, SharedMemoryStore(1))
            client = sharing_client(held, server)
            client.report_gradient(push(20_000, 1))
        served(held, second, SharedMemoryStore(1), server.address)
        client.join(WorkerIdentity("w"))
        client.report_gradient(push(20_000, 2))
        assert_same(first.pushes()[0], push(20_000, 1))
        assert_same(second.pushes()[0], push(20_000, 2))
        assert len(second.pushes()) == 1
        assert sizes[-1] > 1 << 20


def test_a_master_that_is_gone_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = list[SharedChannel | None]()

    def counted(push: Push, channel: SharedChannel | None = None) -> Iterator[bytes]:
        ways.append(channel)
        return push_frames(push, channel)

    with ExitStack() as held:
        with ExitStack() as past:
            server = served(past, Heard(), SharedMemoryStore(1))
            client = sharing_client(held, server)
            client.report_gradient(push(20_000, 1))
        client._connection.deadline_s = 1.0
        monkeypatch.setattr(client._gradients, "_frames", counted)
        with pytest.raises(Unavailable, match=server.address):
            client.report_gradient(push(20_000, 2))
        assert ways
        assert None not in ways
