"""Calls that wait for something to happen on the server: any number of them, on a few threads."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack

import grpc
import pytest

from elastable.embedding_store.errors import StaleVersion
from elastable.embedding_store.wire.access.credentials import Role
from elastable.embedding_store.wire.channels.status_codes import answering
from elastable.embedding_store.wire.server.call_room import CallLimits
from elastable.embedding_store.wire.server.grpc_server import GrpcServer, Service
from elastable.embedding_store.wire.server.handlers import Answer, Later

WAIT_S = 60
LIMITS = CallLimits(threads=4, parked=150, sessions=150)


class Watched(Future[bytes]):
    """A result that says when somebody waits for it, which a call does once it holds no thread."""

    def __init__(self, parked: threading.Semaphore) -> None:
        super().__init__()
        self.parked = parked

    def add_done_callback(self, fn: Callable[[Future[bytes]], object]) -> None:
        super().add_done_callback(fn)
        self.parked.release()


class Waiting:
    """A service whose calls wait for `futures`, in the order in which they came; b"ready" does not wait."""

    def __init__(self, held: ExitStack, limits: CallLimits = LIMITS) -> None:
        self.futures: list[Future[bytes]] = []
        self.came = threading.Semaphore(0)
        self.parked = threading.Semaphore(0)
        self.then: Callable[[bytes], Answer] = lambda reply: reply
        handlers = {
            "One": grpc.unary_unary_rpc_method_handler(self.wait),
            "Many": grpc.unary_stream_rpc_method_handler(self.wait),
            "Frames": grpc.stream_unary_rpc_method_handler(self.wait_for_frames),
        }
        service = Service("test.Waiting", handlers, waiting=frozenset(handlers))
        server = held.enter_context(GrpcServer("127.0.0.1:0", [service], limits, anonymous=Role.ADMINISTRATOR))
        self.channel = held.enter_context(grpc.insecure_channel(server.address))
        self.one = self.channel.unary_unary("/test.Waiting/One", None, None)
        self.many = self.channel.unary_stream("/test.Waiting/Many", None, None)
        self.frames = self.channel.stream_unary("/test.Waiting/Frames", None, None)

    def wait(self, request: bytes, context: grpc.ServicerContext) -> Later[bytes]:
        result = Watched(self.parked)
        if request == b"defect":
            raise RuntimeError("a defect")
        if request == b"ready":
            result.set_result(b"")
        self.futures.append(result)
        self.came.release()
        return Later(result, lambda reply: self.then(reply))

    def wait_for_frames(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Later[bytes]:
        with answering(context):
            return self.wait(b"".join(frames), context)

    def await_calls(self, count: int) -> None:
        """Waits until `count` more calls have been begun. They may hold their threads yet."""
        assert all(self.came.acquire(timeout=WAIT_S) for _ in range(count))

    def await_parked(self, count: int) -> None:
        assert all(self.parked.acquire(timeout=WAIT_S) for _ in range(count))


def test_more_calls_wait_than_there_are_threads(held: ExitStack) -> None:
    served = Waiting(held, CallLimits(threads=4, calls_of_a_client=1_000))
    calls = []
    for _ in range(20):
        calls += [served.one.future(b"", timeout=WAIT_S) for _ in range(3)]
        served.await_parked(3)
    names = [thread.name for thread in threading.enumerate()]
    assert sum(name.startswith(("grpc_", "answers")) for name in names) < 40
    assert not any(call.done() for call in calls)
    for number, future in enumerate(served.futures):
        future.set_result(b"%d" % number)
    assert sorted(int(call.result(timeout=WAIT_S)) for call in calls) == list(range(60))


def test_what_is_there_already_is_answered_at_once(held: ExitStack) -> None:
    served = Waiting(held)
    served.futures = [done := Future[bytes]()]
    done.set_result(b"there")
    served.then = lambda reply: Later(done, lambda again: reply + again) if reply == b"first" else reply
    call = served.one.future(b"", timeout=WAIT_S)
    served.await_calls(1)
    served.futures[-1].set_result(b"first")
    assert call.result(timeout=WAIT_S) == b"firstthere"


@pytest.mark.parametrize(
    ("sizes", "request_"),
    [((), b""), ((3,), b"ready"), ((70_000,), b""), ((3, 1 << 20, 5), b"ready"), ((1 << 20,) * 8, b"")],
)
def test_any_number_of_messages_arrives(held: ExitStack, sizes: tuple[int, ...], request_: bytes) -> None:
    served = Waiting(held)
    served.then = lambda _: (bytes([number]) * size for number, size in enumerate(sizes))
    replies = served.many(request_, timeout=WAIT_S)
    served.await_calls(1)
    if request_ != b"ready":
        served.futures[0].set_result(b"")
    assert [(len(reply), reply[:1]) for reply in replies] == [(n, bytes([i])) for i, n in enumerate(sizes)]


def test_a_defect_or_no_message_before_the_wait_ends_the_call_and_no_other(held: ExitStack) -> None:
    served = Waiting(held)
    error = refused(served.one.future(b"defect", timeout=WAIT_S))
    assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "RuntimeError: a defect")
    silent = served.channel.stream_unary("/test.Waiting/One", None, None)
    error = refused(silent.future(iter(()), timeout=WAIT_S))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "/test.Waiting/One: the call ended before its message"
    assert served.one(b"ready", timeout=WAIT_S) == b""


def test_frames_are_read_before_the_wait(held: ExitStack) -> None:
    served = Waiting(held)
    call = served.frames.future(iter([b"a", b"b"]), timeout=WAIT_S)
    served.await_calls(1)
    served.futures[0].set_result(b"done")
    assert call.result(timeout=WAIT_S) == b"done"


def refused(call: grpc.Future) -> grpc.RpcError:
    error = call.exception(timeout=WAIT_S)  # type: ignore[call-arg]
    assert isinstance(error, grpc.RpcError)
    return error


@pytest.mark.parametrize(
    ("error", "code", "details"),
    [
        (StaleVersion("gone by now"), grpc.StatusCode.FAILED_PRECONDITION, "gone by now"),
        (RuntimeError("a defect"), grpc.StatusCode.INTERNAL, "RuntimeError: a defect"),
    ],
)
def test_errors_while_waiting_and_after_it_keep_their_class(
    held: ExitStack, error: Exception, code: grpc.StatusCode, details: str
) -> None:
    served = Waiting(held)
    calls = [served.one.future(b"", timeout=WAIT_S) for _ in range(2)]
    streamed = served.many(b"", timeout=WAIT_S)
    served.await_calls(3)

    def fail(reply: bytes) -> bytes:
        raise error

    served.then = fail
    served.futures[0].set_exception(error)
    for future in served.futures[1:]:
        future.set_result(b"")
    with pytest.raises(grpc.RpcError) as caught:
        list(streamed)
    assert (caught.value.code(), caught.value.details()) == (code, details)
    for call in calls:
        found = refused(call)
        assert (found.code(), found.details()) == (code, details)
        assert ("StaleVersion" in str(found.trailing_metadata())) is isinstance(error, StaleVersion)


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_that_waited_leaves_nothing_for_the_collector(held: ExitStack, streams: bool) -> None:
    served, freed = Waiting(held), threading.Semaphore(0)
    served.then = lambda reply: [reply] if streams else reply
    gc.disable()
    try:
        replies = served.many(b"", timeout=WAIT_S) if streams else None
        reply = served.one.future(b"", timeout=WAIT_S) if replies is None else None
        served.await_parked(1)
        watched = weakref.ref(served.futures[0], lambda _: freed.release())
        served.futures.pop().set_result(b"there")
        assert list(replies or ()) == [b"there"] * streams
        assert reply is None or reply.result(timeout=WAIT_S) == b"there"
        assert freed.acquire(timeout=WAIT_S)
        assert watched() is None
    finally:
        gc.enable()


def test_a_client_that_leaves_cancels_its_wait_and_frees_its_room(held: ExitStack) -> None:
    served = Waiting(held, CallLimits(threads=4, parked=3))  # two of one host
    calls = [served.one.future(b"", timeout=WAIT_S) for _ in range(2)]
    served.await_calls(2)
    served.await_parked(2)
    third = served.one.future(b"", timeout=WAIT_S)
    error = refused(third)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == "2 waiting calls from ipv4:127.0.0.1 are under way here; try again"
    served.await_calls(1)
    assert served.futures[2].cancelled()
    left = threading.Semaphore(0)
    for future in served.futures[:2]:
        future.add_done_callback(lambda _: left.release())
    for call in calls:
        call.cancel()
    assert all(left.acquire(timeout=WAIT_S) for _ in range(2))
    assert all(future.cancelled() for future in served.futures[:2])
    again = served.one.future(b"", timeout=WAIT_S)
    served.await_calls(1)
    served.futures[3].set_result(b"here")
    assert again.result(timeout=WAIT_S) == b"here"


def test_calls_that_wait_end_with_the_server(held: ExitStack) -> None:
    with ExitStack() as inner:
        served = Waiting(inner)
        call = served.one.future(b"", timeout=WAIT_S)
        served.await_parked(1)
        ended = threading.Event()
        served.futures[0].add_done_callback(lambda _: ended.set())
        channel = inner.pop_all()
    channel.close()
    assert ended.wait(WAIT_S)
    assert served.futures[0].cancelled()
    assert isinstance(refused(call), grpc.RpcError) or call.cancelled()
