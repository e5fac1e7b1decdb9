"""Clients that say nothing, say it slowly, or do not listen: the server stays open to everybody else."""

import re
import resource
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from elastable.embedding_store import MemoryStore, RemoteSource
from elastable.embedding_store.support.futures import settle
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.access.credentials import Credentials, Role
from elastable.embedding_store.wire.channels.status_codes import ERROR_KEY, answering
from elastable.embedding_store.wire.messages.store_messages import STORE_SERVICE
from elastable.embedding_store.wire.server import call_room
from elastable.embedding_store.wire.server.call_guard import MAX_CONTROL_BYTES
from elastable.embedding_store.wire.server.call_room import CallLimits, CallRates
from elastable.embedding_store.wire.server.grpc_server import GrpcServer, Service
from elastable.embedding_store.wire.server.handlers import Later
from elastable.embedding_store.wire.service.store_service import store_service
from tests.certificates import TOKEN
from tests.contracts.store_samples import create_tables, fixed, int64
from tests.raw_http2 import begun, call, connected
from tests.waiting import until

LIMITS = CallLimits(threads=16)
WAIT_S = 180.0
HEALTH = "/grpc.health.v1.Health/Check"


def served(
    held: ExitStack, limits: CallLimits = LIMITS, *more: Service, token: str | None = None
) -> tuple[MemoryStore, str]:
    store = create_tables(held.enter_context(MemoryStore(1)), fixed())
    services, known = [store_service(store), *more], Credentials(token=token)
    server = GrpcServer("127.0.0.1:0", services, limits, known, anonymous=Role.ADMINISTRATOR)
    return store, held.enter_context(server).address


def channel(held: ExitStack, address: str) -> grpc.Channel:
    return held.enter_context(grpc.insecure_channel(address))


@contextmanager
def silent(address: str, method: str, count: int, first: bytes | None = None) -> Iterator[list[grpc.Future]]:
    enough = threading.Event()

    def messages() -> Iterator[bytes]:
        if first is not None:
            yield first
        enough.wait(WAIT_S)

    with grpc.insecure_channel(address) as channel:
        call = channel.stream_unary(method, None, None)
        calls = [call.future(messages(), timeout=WAIT_S) for _ in range(count)]
        try:
            yield calls  # type: ignore[misc]
        finally:
            enough.set()
            for one in calls:
                one.cancel()


def healthy(channel: grpc.Channel) -> bool:
    check = health_pb2_grpc.HealthStub(channel).Check
    reply = check(health_pb2.HealthCheckRequest(), timeout=WAIT_S, wait_for_ready=True)
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def unary(method: Callable[..., object]) -> grpc.RpcMethodHandler:
    return grpc.unary_unary_rpc_method_handler(method)


def holding(leave: threading.Event, inside: threading.Semaphore) -> Callable[..., bytes]:
    def hold(request: bytes, context: grpc.ServicerContext) -> bytes:
        inside.release()
        leave.wait(WAIT_S)
        return b"held"

    return hold


def refused(call: Callable[..., object], why: str, request: bytes = b"") -> None:
    with pytest.raises(grpc.RpcError, match=re.escape(why)) as caught:
        call(request, timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ERROR_KEY not in str(caught.value.trailing_metadata())  # which clients take for: come again


def ended(call: grpc.Future) -> grpc.StatusCode:
    error = call.exception(timeout=WAIT_S)  # type: ignore[call-arg]
    assert isinstance(error, grpc.Call), error
    code: grpc.StatusCode = error.code()
    return code


@pytest.mark.parametrize("method", [HEALTH, f"/{STORE_SERVICE}/LookupSmall"])
def test_calls_whose_message_never_comes_leave_the_server_open(held: ExitStack, method: str) -> None:
    store, address = served(held, CallLimits(threads=16, first_message_s=2.0))
    with silent(address, method, 3 * LIMITS.threads) as calls:
        refused = {ended(call) for call in calls[: LIMITS.threads]}
        assert refused <= {grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED}
        with RemoteSource(address, WAIT_S) as source:
            theirs, ours = (each.lookup({"cities": int64(1)})["cities"] for each in (source, store))
            np.testing.assert_array_equal(theirs, ours)
        while True:  # a health check among others that fill their own room is asked to come again
            try:
                assert healthy(channel(held, address))
                break
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # noqa: PT017


def test_a_stream_that_goes_silent_or_trickles_ends(held: ExitStack) -> None:
    _, address = served(held, CallLimits(threads=16, next_message_s=0.2))
    header = store_pb2.LookupHeader(tables=[store_pb2.TableIds(table="cities", count=1 << 20)])
    first = store_pb2.LookupRequest(header=header).SerializeToString()
    with silent(address, f"/{STORE_SERVICE}/Delete", 1, first) as (call,):
        assert ended(call) in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNIMPLEMENTED)
    trickling = threading.Event()

    def drops() -> Iterator[bytes]:
        yield first
        while not trickling.wait(0.05):  # each in time, all together too little
            yield store_pb2.LookupRequest(body=bytes(8)).SerializeToString()

    call = channel(held, address).stream_stream(f"/{STORE_SERVICE}/Lookup", None, None)(drops(), timeout=WAIT_S)  # type: ignore[assignment]
    with pytest.raises(grpc.RpcError) as caught:
        list(call)  # type: ignore[call-overload]
    trickling.set()
    assert caught.value.code() is grpc.StatusCode.CANCELLED


def test_health_is_reported_while_all_else_is_full_and_sessions_leave_room(held: ExitStack) -> None:
    leave, inside = threading.Event(), threading.Semaphore(0)

    class Over(Future[bytes]):
        """Asked to call back once a session counts as one: until then another one might take its place."""

        def add_done_callback(self, fn: Callable[[Future[bytes]], object]) -> None:
            super().add_done_callback(fn)
            inside.release()

    over = Over()

    hold = holding(leave, inside)

    def stay(request: bytes, context: grpc.ServicerContext) -> Later[bytes]:
        return Later(over, lambda reply: reply)

    handlers = {"Stay": unary(stay), "Work": unary(hold)}
    service = Service("test.Hold", handlers, lambda: settle(over, b"held"), frozenset({"Stay"}))
    limits = CallLimits(threads=16, sessions=54)  # 40 of one host, more than there are threads
    store, address = served(held, limits, service)
    held.callback(leave.set)
    stays = channel(held, address).unary_unary("/test.Hold/Stay", None, None)
    sessions = []
    for _ in range(limits.sessions_of_one):
        sessions.append(stays.future(b"", timeout=WAIT_S))
        assert inside.acquire(timeout=WAIT_S)
    refused(stays, "40 sessions from ipv4:127.0.0.1 are under way here")
    with RemoteSource(address, WAIT_S) as source:
        assert source.version() == store.version()
    work = channel(held, address).unary_unary("/test.Hold/Work", None, None)
    working = [work.future(b"", timeout=WAIT_S) for _ in range(limits.of_a_host)]
    assert all(inside.acquire(timeout=WAIT_S) for _ in working)
    refused(work, "12 calls from ipv4:127.0.0.1 are under way here")
    assert healthy(channel(held, address))
    leave.set()
    over.set_result(b"held")
    assert {call.result(timeout=WAIT_S) for call in (*sessions, *working)} == {b"held"}


@contextmanager
def open_sessions(
    held: ExitStack, limits: CallLimits, token: str | None = None
) -> Iterator[tuple[str, list[Future[bytes]]]]:
    """A server whose sessions `/test.Hold/Stay` wait for these futures; its address."""
    there = list[Future[bytes]]()

    def stay(request: bytes, context: grpc.ServicerContext) -> Later[bytes]:
        there.append(Future())
        return Later(there[-1], lambda reply: reply)

    service = Service("test.Hold", {"Stay": unary(stay)}, sessions=frozenset({"Stay"}))
    yield served(held, limits, service, token=token)[1], there
    for future in there:
        settle(future, b"held")


def stays(held: ExitStack, address: str) -> Callable[..., grpc.Future]:
    """The call, on a connection of its own."""
    own = held.enter_context(grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]))
    return lambda: own.unary_unary("/test.Hold/Stay", None, None).future(b"", timeout=WAIT_S)


def test_one_connection_has_some_of_all_sessions(held: ExitStack) -> None:
    limits = CallLimits(threads=16, sessions=40, sessions_of_a_client=3)
    with open_sessions(held, limits) as (address, there):
        for call in (stays(held, address), stays(held, address)):
            before = len(there)
            sessions = [call() for _ in range(3)]
            until(lambda before=before: len(there) == before + 3)  # type: ignore[misc]
            assert ended(call()) is grpc.StatusCode.RESOURCE_EXHAUSTED
            sessions[0].cancel()
            until(lambda call=call, before=before: call() and len(there) > before + 3)  # type: ignore[misc]


def test_one_identity_has_some_of_all_sessions_wherever_it_calls_from(held: ExitStack) -> None:
    with open_sessions(held, CallLimits(threads=16, sessions=8), token=TOKEN) as (address, there):
        clients = [held.enter_context(connected(address, begun(), f"127.0.0.{host}")) for host in (2, 3)]
        for number, client in enumerate(3 * clients):
            client.sendall(call(2 * number + 1, "/test.Hold/Stay", token=TOKEN))
        until(lambda: len(there) == 6)
        stay = channel(held, address).unary_unary("/test.Hold/Stay", None, None)
        with pytest.raises(grpc.RpcError, match="6 sessions of the administrator's token are under way here"):
            stay(b"", timeout=WAIT_S, metadata=(("authorization", f"Bearer {TOKEN}"),))
        other = stay.future(b"", timeout=WAIT_S)  # of somebody else
        until(lambda: len(there) == 7)
        there[6].set_result(b"held")
        assert other.result() == b"held"


@pytest.mark.parametrize(("of_a_client", "streamed"), [(1 << 20, False), (1 << 30, True)])
def test_answers_that_nobody_reads_are_bounded_and_end(
    held: ExitStack, of_a_client: int, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned = threading.Event()
    monkeypatch.setattr(call_room, "return_freed_memory", returned.set)
    reply, made = bytes(256 << 10), Counter[str]()

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        made["answers"] += 1
        context.add_callback(lambda: made.update(["over", str(context.code())]))  # type: ignore[attr-defined]
        return reply

    handler = grpc.unary_stream_rpc_method_handler(lambda *of: iter([answer(*of)])) if streamed else unary(answer)
    in_all = 4 << 20
    limits = CallLimits(upload_bytes=in_all, upload_bytes_of_a_client=of_a_client, unread_s=3.0)
    _, address = served(held, limits, Service("test.Hold", {"Work": handler}))
    most = min(in_all, of_a_client) // len(reply)
    with connected(address, begun(window=0)) as client, until_read(client) as said:
        for stream in range(1, 81, 2):
            client.sendall(call(stream, "/test.Hold/Work"))
        until(lambda: made["answers"] == 40, WAIT_S)
        until(lambda: made["over"] >= 40 - most, WAIT_S)  # refused: their answers are dropped
        assert made["over"] == 40 - most or time.monotonic() - said[0] > limits.unread_s
        assert made[str(grpc.StatusCode.RESOURCE_EXHAUSTED)]
        ask = channel(held, address).unary_stream("/test.Hold/Work", None, None)
        if of_a_client == 1 << 20:
            assert list(ask(b"", timeout=WAIT_S)) == [reply]  # another client
        until(lambda: made["over"] >= 40, WAIT_S)
        assert returned.wait(WAIT_S)
        assert list(ask(b"", timeout=WAIT_S)) == [reply]


@contextmanager
def until_read(client: socket.socket) -> Iterator[list[float]]:
    """Reads and drops what the server says, but for answers, which have no room; when that began."""

    def read() -> None:
        with suppress(OSError):
            while client.recv(1 << 16):
                pass

    thread = threading.Thread(target=read)
    thread.start()
    yield [time.monotonic()]
    with suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)
    thread.join()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_messages_that_are_none_are_refused_by_name_and_cost_nothing(held: ExitStack) -> None:
    _, address = served(held)
    call = channel(held, address).unary_unary(f"/{STORE_SERVICE}/CreateTable", None, None)

    def refused(message: bytes) -> str:
        with pytest.raises(grpc.RpcError) as caught:
            call(message, timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert dict(caught.value.trailing_metadata())[ERROR_KEY] == "BadInput"  # type: ignore[arg-type, index]
        return str(caught.value.details())

    assert "is not what this call takes" in refused(b"\xff" * 100)
    assert f"the longest here has {MAX_CONTROL_BYTES}" in refused(bytes(MAX_CONTROL_BYTES + 1))
    for _ in range(500):
        refused(b"\xff" * 1000)
    grown = []
    for _ in range(3):  # what other threads take meanwhile is not taken each time
        before = resident_bytes()
        for _ in range(700):
            refused(b"\xff" * 1000)
        grown.append(resident_bytes() - before)
    assert min(grown) < 4 << 20, grown  # 16 KB for each would be 11 MB


def test_a_call_without_room_takes_that_of_the_most_silent(held: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_room, "_LOOK_S", 3_600.0)  # nobody looks who is late
    _, address = served(held, CallLimits(threads=16, first_message_s=3_600.0))
    with silent(address, f"/{STORE_SERVICE}/GetStoreStatus", LIMITS.threads) as calls:
        refused = LIMITS.threads - LIMITS.of_a_host  # those that find no room
        until(lambda: sum(call.done() for call in calls) >= refused)
        time.sleep(2 * call_room._SHORT_S)  # the others count as silent by then
        ask = channel(held, address).unary_unary(f"/{STORE_SERVICE}/GetStoreStatus", None, None)
        for _ in range(2 * LIMITS.threads):
            ask(b"", timeout=WAIT_S)
        until(lambda: sum(not call.done() for call in calls) < LIMITS.of_a_host)
        assert not all(call.done() for call in calls)


def two_clients(held: ExitStack, limits: CallLimits, method: Callable[..., object]) -> list[Callable[..., object]]:
    _, address = served(held, limits, Service("test.Service", {"Work": unary(method)}))
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [held.enter_context(grpc.insecure_channel(address, options)) for _ in range(2)]
    return [channel.unary_unary("/test.Service/Work", None, None) for channel in channels]


def test_one_client_cannot_have_all_calls(held: ExitStack) -> None:
    leave, inside = threading.Event(), threading.Semaphore(0)
    held.callback(leave.set)

    hold = holding(leave, inside)
    greedy, other = two_clients(held, CallLimits(threads=16, calls_of_a_client=3), hold)
    calls = [greedy.future(b"", timeout=WAIT_S) for _ in range(3)]  # type: ignore[attr-defined]
    assert all(inside.acquire(timeout=WAIT_S) for _ in calls)
    refused(greedy, "3 calls of the client ipv4:127.0.0.1:")
    calls.append(other.future(b"", timeout=WAIT_S))  # type: ignore[attr-defined]
    assert inside.acquire(timeout=WAIT_S)
    leave.set()
    assert {call.result(timeout=WAIT_S) for call in calls} == {b"held"}
    assert greedy(b"", timeout=WAIT_S) == b"held"


def test_one_client_cannot_make_all_calls(held: ExitStack) -> None:
    limits = CallLimits(threads=16, calls_a_second_of_a_client=0.001)
    greedy, other = two_clients(held, limits, lambda request, context: b"done")
    assert greedy(b"", timeout=WAIT_S) == b"done"
    refused(greedy, "makes more than 0.001 calls a second; try again")
    assert other(b"", timeout=WAIT_S) == b"done"


def test_clients_beyond_their_rate_wait(held: ExitStack) -> None:
    _, address = served(held, CallLimits(threads=16, calls_a_second_of_a_client=4))
    source = held.enter_context(closing(RemoteSource(address, WAIT_S)))
    assert [source.version() for _ in range(8)] == [source.version()] * 8


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (CallLimits(threads=16, upload_bytes=1 << 20), "requests of "),
        (CallLimits(threads=16, upload_bytes=8 << 20, upload_bytes_of_a_client=1 << 20), "bytes from ipv4:"),
    ],
)
def test_requests_have_limited_room_and_the_oldest_has_any(held: ExitStack, limits: CallLimits, why: str) -> None:
    inside, more = threading.Semaphore(0), threading.Event()

    def take(frames: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        taken = 0
        with answering(context):
            for frame in frames:
                taken += len(frame)
                inside.release()
        return str(taken).encode()

    service = Service("test.Take", {"Up": grpc.stream_unary_rpc_method_handler(take)})
    _, address = served(held, limits, service)
    up = channel(held, address).stream_unary("/test.Take/Up", None, None)

    def frames() -> Iterator[bytes]:
        yield bytes(3 << 18)
        assert more.wait(WAIT_S)
        yield from (bytes(1 << 20) for _ in range(3))  # far more than there is room for

    held.callback(more.set)
    oldest = up.future(frames(), timeout=WAIT_S)
    assert inside.acquire(timeout=WAIT_S)
    refused(lambda request, timeout: up(iter([request]), timeout=timeout), why, bytes(1 << 19))
    more.set()
    assert oldest.result(timeout=WAIT_S) == str((3 << 18) + (3 << 20)).encode()
    assert up(iter([bytes(1 << 19)]), timeout=WAIT_S) == str(1 << 19).encode()  # the room is free again


@given(
    most=st.sampled_from([0.25, 1.0, 7.0, 100.0]),
    calls=st.lists(st.tuples(st.floats(0.0, 3.0), st.sampled_from(["one", "two"])), max_size=60),
)
def test_in_no_span_of_time_a_client_makes_more_than_its_share(most: float, calls: list[tuple[float, str]]) -> None:
    now = 1_000.0
    rates = CallRates(most, lambda: now)
    made: dict[str, list[float]] = defaultdict(list)
    for pause, client in calls:
        now += pause
        if rates.take(client):
            made[client].append(now)
        else:
            assert made[client], f"{client} was refused its first call"
    for times in made.values():
        for first, since in enumerate(times):
            for last in range(first, len(times)):
                assert last - first + 1 <= max(most, 1.0) + most * (times[last] - since) + 1e-6


def test_a_client_that_keeps_its_rate_is_never_refused() -> None:
    now, unlimited = 0.0, CallRates(None)
    rates = CallRates(10.0, lambda: now)
    for number in range(1_000):
        now = number / 9.9
        assert rates.take("one")
        assert unlimited.take("one")


def test_clients_that_are_gone_are_forgotten() -> None:
    now = 0.0
    rates = CallRates(10.0, lambda: now)
    for number in range(10_000):
        now = number * 1.0
        assert rates.take(f"client {number}")
    assert len(rates._paid) <= 4_096
