"""Small messages whose answer, or whose parsing, would cost much."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import grpc
import numpy as np
import pytest

from elastable.embedding_store import AdmissionSpec, MemoryStore, RemoteStore, RowBlock, TableSpec
from elastable.embedding_store.errors import BadInput, BadSpec, DeadlineExceeded
from elastable.embedding_store.support.array_body import BodyPlan
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.messages.frames import MAX_ENTRIES, FrameReader, ReplyRoom, encode
from elastable.embedding_store.wire.messages.store_messages import STORE_SERVICE
from elastable.embedding_store.wire.pushes import shard_service
from elastable.embedding_store.wire.service import store_service as service
from tests.contracts.store_samples import create_tables, fixed, rows_by_id
from tests.embedding_store.serving import serving

WAIT_S = 60


def served(held: ExitStack) -> tuple[MemoryStore, RemoteStore, grpc.Channel]:
    store = create_tables(held.enter_context(MemoryStore(1)), fixed())
    server = held.enter_context(serving(store, writable=True))
    client = held.enter_context(RemoteStore(server.address, WAIT_S))
    return store, client, held.enter_context(grpc.insecure_channel(server.address))


def test_a_million_empty_entries_are_refused_before_they_are_parsed(held: ExitStack) -> None:
    _, client, channel = served(held)
    header = b"\x0a\x00" * 1_400_000 + b"\xff"  # a parser would refuse the last byte, by another message
    frame = next(encode(header, []))
    lookup = channel.unary_unary(f"/{STORE_SERVICE}/LookupSmall", None, None)
    with pytest.raises(grpc.RpcError, match=f"more than {MAX_ENTRIES} entries in its header") as caught:
        lookup(frame, timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert client.version() == 0


def test_as_many_entries_as_there_may_be_are_read() -> None:
    header = store_pb2.LookupHeader(tables=[store_pb2.TableIds(table=f"t{i}", count=0) for i in range(MAX_ENTRIES)])
    frame = next(encode(header.SerializeToString(), []))
    assert len(FrameReader([frame], "LookupRequest").header(store_pb2.LookupHeader).tables) == MAX_ENTRIES
    header.tables.add(table="one more")
    frame = next(encode(header.SerializeToString(), []))
    with pytest.raises(BadInput, match="split the call"):
        FrameReader([frame], "LookupRequest").header(store_pb2.LookupHeader)


@pytest.mark.parametrize("header", [b"\x0a\xff\xff\xff\xff\x0f" * 10_000, b"\xff" * 40_000, b"\x0b" * 40_000])
def test_a_long_header_that_is_no_message_is_refused_by_name(header: bytes) -> None:
    with pytest.raises(BadInput, match=r"LookupRequest: (its header|more than)"):
        FrameReader([next(encode(header, []))], "LookupRequest").header(store_pb2.LookupHeader)


def test_an_array_of_a_hundred_thousand_dimensions_is_refused_before_its_lengths_are_multiplied() -> None:
    with pytest.raises(BadInput, match="M: gradient has 100000 dimensions; an array has at most 32"):
        BodyPlan("M").add("gradient", (127,) * 100_000, np.dtype(np.float32))


def test_replies_wait_for_room_and_give_up_by_name() -> None:
    room = ReplyRoom(most=10 << 20, wait_s=0.1)
    with room.taken(100 << 20, "one"):  # alone, a reply may be as long as any
        with room.taken(1 << 10, "two"):  # a small one counts as nothing
            pass
        with pytest.raises(DeadlineExceeded, match=r"waited 0\.1 s: others of 104857600 bytes"):
            room.taken(6 << 20, "two").__enter__()
    with room.taken(6 << 20, "one"), pytest.raises(DeadlineExceeded), room.taken(6 << 20, "two"):
        pass
    with room.taken(4 << 20, "one"):  # one client has half of it
        with pytest.raises(DeadlineExceeded, match=r"waited 0\.1 s: others of one of 4194304 bytes"):
            room.taken(2 << 20, "one").__enter__()
        with room.taken(5 << 20, "two"):
            pass
    with room.taken(4 << 20, "one"), room.taken(4 << 20, "two"):
        pass
    patient = ReplyRoom(most=10 << 20, wait_s=WAIT_S)

    def second() -> None:
        with patient.taken(6 << 20, "two"):
            pass

    with ThreadPoolExecutor(1) as pool:
        with patient.taken(6 << 20, "one"):
            waiting = pool.submit(second)
        waiting.result(WAIT_S)


def test_unread_replies_do_not_add_up(held: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one client leave room to another one, and their own is free again once it is gone."""
    monkeypatch.setattr(service, "ReplyRoom", lambda: ReplyRoom(most=32 << 20, wait_s=0.2))
    store, other, _ = served(held)
    window = [("grpc.http2.bdp_probe", 0)]  # else it may grow until a reply that nobody reads is sent
    channel = held.enter_context(grpc.insecure_channel(other.address, window))
    store.create_table(TableSpec("wide", 1024, 10_000))
    header = store_pb2.LookupHeader(tables=[store_pb2.TableIds(table="wide", count=4_000)])
    frames = list(encode(header.SerializeToString(), [np.zeros(4_000, np.int64)]))
    lookup = channel.stream_stream(f"/{STORE_SERVICE}/Lookup", None, None)
    first = lookup(iter(frames), timeout=WAIT_S)
    assert next(first)  # type: ignore[call-overload]  # and then nobody reads on
    with pytest.raises(grpc.RpcError, match=r"others of ipv4:127\.0\.0\.1:\d+ of 16384000 bytes are still being sent"):
        next(lookup(iter(frames), timeout=WAIT_S))  # type: ignore[call-overload]
    assert other.lookup({"wide": np.arange(3_900)})["wide"].shape == (3_900, 1024)
    assert other.lookup({"cities": np.arange(3)})["cities"].shape == (3, 4)
    first.cancel()
    late = time.monotonic() + WAIT_S
    while True:  # until the server has heard of it
        with suppress(grpc.RpcError):
            assert len(list(lookup(iter(frames), timeout=WAIT_S))) > 1
            return
        assert time.monotonic() < late


def test_a_scan_cannot_ask_for_blocks_of_any_size(held: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_BLOCK_BYTES", 10 << 10)
    store, client, _ = served(held)
    store.create_table(TableSpec("t", 16, 5_000))
    ids = np.arange(5_000)
    store.put("t", [RowBlock(ids, np.ones((5_000, 16), np.float32), np.empty((5_000, 0), np.float32))])
    sizes = [len(block.ids) for block in client.scan("t", 2**31 - 1)]
    assert sum(sizes) == 5_000
    assert max(sizes) <= (10 << 10) // 64
    assert rows_by_id(client, "t") == rows_by_id(store, "t")


def test_tables_pins_names_and_sketches_have_limits(held: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_service, "MOST_TABLES", 2)
    monkeypatch.setattr(service, "MOST_PINS", 2)
    _, client, _ = served(held)
    client.create_table(fixed("another"))
    client.create_table(fixed("another"))
    with pytest.raises(BadInput, match="'third': 2 tables are here"):
        client.create_table(fixed("third"))
    pins = [client.pin() for _ in range(2)]
    with pytest.raises(BadInput, match="2 pins are held here"):
        client.pin()
    pins[0].close()
    client.pin().close()
    monkeypatch.setattr(service, "MOST_PINS_OF_A_CLIENT", 1)
    with pytest.raises(BadInput, match="this client holds 1 pins, the most of one"):
        client.pin()
    pins[1].close()
    with pytest.raises(BadSpec, match="600 bytes; the most are 256"):
        fixed("無" * 200)
    with pytest.raises(BadSpec, match=r"counters must lie from 16 to 2\*\*30"):
        AdmissionSpec(2, 1 << 31)
