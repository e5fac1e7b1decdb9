"""Rows gathered into frames are the message that the generated code reads."""

import threading
import time
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from elastable.embedding_store import Commit, MemoryStore, OptimizerSpec, TableSpec, TableUpdate
from elastable.embedding_store.contract.row_source import LookupRequest
from elastable.embedding_store.errors import BadInput, DeadlineExceeded, StaleVersion, StoreFailed
from elastable.embedding_store.support.array_body import BodyPlan
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.messages import frames as messages
from elastable.embedding_store.wire.messages.frames import (
    MAX_FRAME_BYTES,
    FrameReader,
    ReplyFrames,
    ReplyRoom,
    frame_prefix,
)

DIMS = {"narrow": 3, "wide": 64, "widest": 65_536}


@pytest.fixture(scope="module")
def store() -> Iterator[MemoryStore]:
    with MemoryStore(2) as store:
        for name, dim in DIMS.items():
            store.create_table(TableSpec(name, dim))
        yield store


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


def header_of(counts: dict[str, int], version: int = 7) -> bytes:
    tables = [store_pb2.TableRows(table=name, count=count, dim=DIMS[name]) for name, count in counts.items()]
    return store_pb2.LookupReplyHeader(tables=tables, version=version).SerializeToString()


@pytest.mark.parametrize("size", [0, 4, 124, 128, 16_380, 16_384, 1 << 20, 3 << 20])
def test_bodies_begin_where_a_float_may(size: int) -> None:
    body = np.arange(size, dtype=np.uint8).tobytes()
    if size < 2 << 20:
        assert len(frame_prefix(None, size)) % 4 == 0
        assert store_pb2.LookupReply.FromString(frame_prefix(None, size) + body).body == body
    for length in (*range(1, 9), 120, 121, 122, 123, 124, 125, 16_370, 16_377, 16_378, 16_379, 16_380, 70_001):
        header = store_pb2.LookupReplyHeader(tables=[store_pb2.TableRows(table="t" * length)]).SerializeToString()
        prefix = frame_prefix(header, size)
        assert len(prefix) % 4 == 0
        frame = store_pb2.LookupReply.FromString(prefix + body)
        assert (frame.header.SerializeToString(), frame.body) == (header, body)
        assert FrameReader([prefix + body], "LookupReply").header(store_pb2.LookupReplyHeader) == frame.header


@pytest.mark.parametrize(
    "counts", [{"wide": 1}, {"narrow": 0}, {"wide": 70_000}, {"narrow": 300_001, "wide": 5_000, "widest": 9}, {}]
)
def test_frames_are_one_message(store: MemoryStore, threads: ThreadPoolExecutor, counts: dict[str, int]) -> None:
    ids = {name: np.arange(count) * 3 for name, count in counts.items()}
    header = header_of(counts)
    frames = list(ReplyFrames(header, ids, DIMS).filled(store, 0, threads))
    assert all(len(frame) <= MAX_FRAME_BYTES for frame in frames)
    messages = [store_pb2.LookupReply.FromString(frame) for frame in frames]
    assert messages[0].header.SerializeToString() == header
    assert not any(message.HasField("header") for message in messages[1:])
    expected = b"".join(store.lookup({name: wanted})[name].tobytes() for name, wanted in ids.items())
    assert b"".join(message.body for message in messages) == expected
    plan = BodyPlan("LookupReply")
    for name, count in counts.items():
        plan.add(name, (count, DIMS[name]), np.dtype(np.float32))
    reader = FrameReader(frames, "LookupReply")
    for rows, (name, wanted) in zip(reader.read(plan), ids.items(), strict=True):
        np.testing.assert_array_equal(rows, store.lookup({name: wanted})[name])


def test_a_long_header_stands_alone(store: MemoryStore, threads: ThreadPoolExecutor) -> None:
    header = bytes((1 << 20) + 5)
    first, *others = ReplyFrames(header, {"wide": np.arange(5)}, DIMS).filled(store, 0, threads)
    assert len(first) < len(header) + 16
    assert len(others) == 1
    with pytest.raises(BadInput, match="does not fit"):
        ReplyFrames(bytes(MAX_FRAME_BYTES), {"wide": np.arange(5)}, DIMS)


@pytest.mark.parametrize("count", [5, 100_000])
def test_what_goes_wrong_is_raised(store: MemoryStore, threads: ThreadPoolExecutor, count: int) -> None:
    with pytest.raises(StaleVersion):
        list(ReplyFrames(header_of({"wide": count}), {"wide": np.arange(count)}, DIMS).filled(store, -1, threads))


def test_nobody_has_to_take_the_frames(store: MemoryStore, threads: ThreadPoolExecutor) -> None:
    for _ in range(20):
        frames = ReplyFrames(header_of({"wide": 100_000}), {"wide": np.arange(100_000)}, DIMS).filled(store, 0, threads)
        assert next(frames)
        frames.close()


def test_a_slow_client_delays_no_commit_and_gets_one_version(threads: ThreadPoolExecutor) -> None:
    count = 100_000
    ids = np.arange(count)
    with MemoryStore(2, timeout_s=60.0) as store:
        store.create_table(TableSpec("wide", 64, optimizer=OptimizerSpec.of("sgd", learning_rate=1.0)))
        before = store.lookup({"wide": ids})["wide"]
        frames = ReplyFrames(header_of({"wide": count}), {"wide": ids}, DIMS).filled(store, 0, threads)
        taken = [next(frames)]  # the store is locked until somebody fills the other frames
        gradients = np.ones((count, 64), np.float32)
        store.commit(Commit(1, {"wide": TableUpdate(ids, gradients)}, 0, {}))
        taken += frames
        body = b"".join(store_pb2.LookupReply.FromString(frame).body for frame in taken)
        assert body == before.tobytes()
        assert not np.array_equal(store.lookup({"wide": ids})["wide"], before)


def test_a_lookup_that_fails_in_another_thread_is_raised_to_who_takes_its_frames(threads: ThreadPoolExecutor) -> None:
    class Breaks(MemoryStore):
        def lookup_in_order(
            self, requests: Iterable[LookupRequest], version: int | None
        ) -> Generator[None, None, None]:
            for number, _ in enumerate(requests):
                if number == 2:
                    raise StoreFailed("it broke")
                yield

    with Breaks(1) as store:
        frames = ReplyFrames(header_of({"wide": 20_000}), {"wide": np.arange(20_000)}, DIMS).filled(store, 0, threads)
        assert next(frames)
        threads.submit(lambda: None).result(timeout=60)  # the one thread has gone through by then
        assert next(frames)
        with pytest.raises(StoreFailed, match="it broke"):
            next(frames)


def test_room_is_waited_for_while_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, room, had = threading.Semaphore(0), ReplyRoom(10 << 20, wait_s=0.01), threading.Event()

    def compiling_all_the_time() -> float:
        asked.release()
        return time.monotonic()

    def another() -> None:
        with room.taken(9 << 20, "one"):
            had.set()

    monkeypatch.setattr(messages, "compile_seconds", compiling_all_the_time)
    with room.taken(9 << 20, "one"):
        waits = threading.Thread(target=another)
        waits.start()
        assert all(asked.acquire(timeout=60) for _ in range(5))  # its time was up four times
        assert not had.is_set()
    assert had.wait(60)
    waits.join()
    monkeypatch.setattr(messages, "compile_seconds", lambda: 0.0)
    with (
        room.taken(9 << 20, "one"),
        pytest.raises(DeadlineExceeded, match="are still being sent"),
        room.taken(9 << 20, "one"),
    ):
        pass
