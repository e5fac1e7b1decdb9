"""gRPC handlers of a servicer's methods: decode the request, call the method, encode the reply."""

import re
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.wire.access.credentials import Proof, secret_of

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


# Handlers of a servicer's methods, by the names and shapes of the calls in proto/


_OF_CALL: dict[str, Callable[[grpc.ServicerContext], object]] = {
    "context": lambda context: context,
    "client": lambda context: unquote(context.peer()),
    "session": partial(secret_of, proof=Proof.SESSION),
    "owner": partial(secret_of, proof=Proof.OWNER),
}


def handlers_of(service: str, methods: object) -> dict[str, Handler]:
    """Handlers of those calls of a service for which there is a method, named as the call is: `lookup_small`.

    A method takes the request: parsed, unless its annotation is `bytes`; of a call that takes a stream an iterator of
    bytes. And it takes by name what it wants of the call: its `context`, the address of its `client`, the secret of a
    `session` or of an `owner`. It returns a message or bytes, or an iterable of them where the call answers with a
    stream; or it may return a `Later`, as `Service.waiting` says.

    Args:
        service: Full name.
        methods: Has them as attributes.
    """
    found = {}
    for call in descriptor_pool.Default().FindServiceByName(service).methods:
        method = getattr(methods, re.sub(r"(?<!^)(?=[A-Z])", "_", call.name).lower(), None)
        if method is not None:
            found[call.name] = _handler(method, call)
    return found


def _handler(method: Callable[..., Any], call: Any) -> Handler:
    request, *more = signature(method).parameters.values()
    finds = [_OF_CALL[of.name] for of in more]
    raw = call.client_streaming or request.annotation is bytes
    parse = None if raw else GetMessageClass(call.input_type).FromString
    make = _SHAPES[call.client_streaming, call.server_streaming]
    return make(lambda request, context: method(request, *(find(context) for find in finds)), parse, _serialized)


def _serialized(reply: Body) -> bytes:
    return reply if isinstance(reply, bytes) else reply.SerializeToString()
