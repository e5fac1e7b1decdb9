"""gRPC handlers of a servicer's methods: decode the request, call the method, encode the reply."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf.message import Message

from elastable.embedding_store.errors import BadInput

Body = Message | bytes
"""A request or reply: a small message, or a frame."""

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Body, Body]
    Interceptor = grpc.ServerInterceptor[Body, Body]
else:  # gRPC's classes take no types at run time
    Handler, Interceptor = grpc.RpcMethodHandler, grpc.ServerInterceptor


_SHAPES: dict[tuple[bool, bool], Callable[..., Handler]] = {  # by whether requests and replies are streams
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def behaviour_of(handler: Handler) -> Callable[..., Any]:
    """The function that a handler calls, whatever its shape."""
    shapes = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    return next(behaviour for behaviour in shapes if behaviour is not None)


def with_behaviour(handler: Handler, behaviour: Callable[..., Any]) -> Handler:
    """A handler of the same shape that calls another function."""
    make = _SHAPES[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(behaviour, handler.request_deserializer, handler.response_serializer)


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
    """

    result: Future[T]
    then: "Callable[[T], Answer]"
    first: Iterable[Body] = ()

    def at_once(self) -> "Answer":
        """The answer, for a call that may not wait.

        Raises:
            BadInput: its result is not there yet.
        """
        if not self.result.done():
            self.result.cancel()
            raise BadInput("this call does not wait: wait_ms must be 0")
        return self.then(self.result.result())


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


def both_ways(method: Callable[..., Iterable[bytes] | Later[Any]], *of_call: OfCall) -> Handler:
    """A call of frames each way, whose answer may come later; arguments as of `control`."""
    return grpc.stream_stream_rpc_method_handler(_method(method, of_call))


def client_of(context: grpc.ServicerContext) -> str:
    """The address that a call comes from."""
    return unquote(context.peer())


def _method(method: Callable[..., Any], of_call: Sequence[OfCall]) -> Callable[[Any, grpc.ServicerContext], Any]:
    return lambda request, context: method(request, *(find(context) for find in of_call))


def _serialized(reply: Message) -> bytes:
    return reply.SerializeToString()
