"""gRPC handlers of a servicer's methods: decode the request, call the method, encode the reply."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf.message import Message
from grpc import _server as grpc_server
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from elastable.embedding_store.support.futures import at_once

Body = Message | bytes
"""A request or reply: a small message, or a frame."""

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Body, Body]
    Interceptor = grpc.ServerInterceptor[Body, Body]
else:  # gRPC's classes take no types at run time
    Handler, Interceptor = grpc.RpcMethodHandler, grpc.ServerInterceptor


# How calls begin that may wait: without a thread


Send = Callable[[Body | None], None]
"""Sends one message of an answer, waiting until it is on its way; None: ends the call with its context's status."""

_MARK = "experimental_non_blocking"
_SHAPES: dict[tuple[bool, bool], Callable[..., Handler]] = {  # by whether requests and replies are streams
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
_LOG = logging.getLogger(__name__)


class _AtOnce(ThreadPoolExecutor):
    """Does what it is given in the thread that gives it; gRPC takes nothing but a thread pool."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)
        self._done = at_once(None)

    def submit(self, fn: "Callable[..., T]", /, *args: Any, **kwargs: Any) -> "Future[T]":
        """Calls it; what it returns is not kept, and it catches what it raises."""
        fn(*args, **kwargs)
        return self._done  # type: ignore[return-value]


_AT_ONCE = _AtOnce()


def begins_without_blocking(begin: Callable[..., Any]) -> Handler:
    """The handler of a call that is begun by `begin(messages, context, send)`, and ended by `send(None)`.

    gRPC's serving thread calls `begin`, which must not wait for anything.
    """
    setattr(begin, _MARK, True)
    begin.experimental_thread_pool = _AT_ONCE  # type: ignore[attr-defined]
    return grpc.stream_stream_rpc_method_handler(begin)


def holds_no_thread(handler: Handler) -> bool:
    """Whether it is such a handler."""
    return getattr(handler.stream_stream, _MARK, False)


def behaviour_of(handler: Handler) -> Callable[..., Any]:
    """The function that a handler calls, whatever its shape."""
    shapes = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    return next(behaviour for behaviour in shapes if behaviour is not None)


def with_behaviour(handler: Handler, behaviour: Callable[..., Any]) -> Handler:
    """A handler of the same shape that calls another function."""
    if holds_no_thread(handler):
        return begins_without_blocking(behaviour)
    make = _SHAPES[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(behaviour, handler.request_deserializer, handler.response_serializer)


def before_each_call(handler: Handler, do: Callable[[grpc.ServicerContext], None]) -> Handler:
    """The handler, with `do(context)` before whatever a call does."""
    behaviour = behaviour_of(handler)

    def begun(request: object, context: grpc.ServicerContext, *send: Send) -> object:
        do(context)
        return behaviour(request, context, *send)

    return with_behaviour(handler, begun)


def at_end_of(context: grpc.ServicerContext, do: Callable[[], None]) -> None:
    """Calls `do()` once the call has ended, however it does."""
    if not context.add_callback(do):  # its client is gone already
        do()


def code_of(context: grpc.ServicerContext) -> str:
    """Name of the status code of a call that has ended."""
    state = context._state  # type: ignore[attr-defined]
    if not state.statused and state.client is grpc_server._CANCELLED:
        return grpc.StatusCode.CANCELLED.name
    code = state.code
    return code.name if isinstance(code, grpc.StatusCode) else grpc.StatusCode.OK.name if code is None else "UNKNOWN"


def send_last(context: grpc.ServicerContext, message: bytes) -> None:
    """Sends the only message of an answer and its status at once, as gRPC does for calls of one message.

    `Send` would wait until the message is on its way, and send the status after it.
    """
    grpc_server._status(context._rpc_event, context._state, message)  # type: ignore[attr-defined]


def receive_first(context: grpc.ServicerContext, then: Callable[[bytes | None], None]) -> None:
    """Has `then` called by the serving thread once the first message of a call is there; None: there will be none.

    `then` must not wait for anything, least of all for a message to be sent or received: the serving thread does that.
    """
    call, state = context._rpc_event.call, context._state  # type: ignore[attr-defined]
    receive = grpc_server._receive_message(state, call, None)

    def received(event: object) -> object:
        ended = receive(event)
        message, state.request = state.request, None
        try:
            then(message)
        except Exception:  # noqa: BLE001 - the serving thread must go on
            _LOG.exception("unexpected error while receiving a call")
        return ended

    with state.condition:
        operation = cygrpc.ReceiveMessageOperation(grpc_server._EMPTY_FLAGS)
        call.start_server_batch((operation,), received)
        state.due.add(grpc_server._RECEIVE_MESSAGE_TOKEN)


# Answers that come later: what a call returns that waits without a thread


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Later(Generic[T]):
    """What a method returns whose answer is not there yet; see `Service.waiting`.

    The call gives its thread back. It goes on in another one once `result` is there; `result` is cancelled where the
    call ends before, as its client is gone.

    Attributes:
        result: What is waited for.
        then: Makes the rest of the answer of it: a message, several of a call that streams, or another wait.
        first: Messages that are sent before the wait, of a call that streams.
        light: Whether `then` takes microseconds, waits for nothing and calls nobody, so that the thread that sets the
            result may answer; or a function that says so of a result.
    """

    result: Future[T]
    then: "Callable[[T], Answer]"
    first: tuple[Body, ...] = ()
    light: "Light[T]" = False


Light = bool | Callable[[T], bool]
Answer = Body | Iterable[Body] | Later[Any]


OfCall = Callable[[grpc.ServicerContext], object]
"""What a method takes of a call next to the request."""


def control(method: Callable[..., Any], request: type[Message], *of_call: OfCall) -> Handler:
    """A call of one small message each way, whose answer may come later.

    Args:
        method: Takes the message, and what `of_call` finds in the call's context.
        request: The message's class.
        of_call: For example `client_of`.
    """
    return grpc.unary_unary_rpc_method_handler(_method(method, of_call), request.FromString, _serialized)


def upload(method: Callable[..., Message | Later[Any]], *of_call: OfCall) -> Handler:
    """A call of frames that are answered by one small message, or later; arguments as of `control`."""
    return grpc.stream_unary_rpc_method_handler(_method(method, of_call), None, _serialized)


def stream(method: Callable[..., Iterable[bytes] | Later[Any]], request: type[Message], *of_call: OfCall) -> Handler:
    """A call of one small message that is answered by frames, or later; arguments as of `control`."""
    return grpc.unary_stream_rpc_method_handler(_method(method, of_call), request.FromString, None)


def both_ways(method: Callable[[Iterator[bytes]], Iterable[bytes] | Later[Any]]) -> Handler:
    """A call of frames each way, whose answer may come later."""
    return grpc.stream_stream_rpc_method_handler(_method(method, ()))


def client_of(context: grpc.ServicerContext) -> str:
    """The address that a call comes from."""
    return unquote(context.peer())


def _method(method: Callable[..., Any], of_call: Sequence[OfCall]) -> Callable[[Any, grpc.ServicerContext], Any]:
    return lambda request, context: method(request, *(find(context) for find in of_call))


def _serialized(reply: Message) -> bytes:
    return reply.SerializeToString()
