"""gRPC handlers of a servicer's methods: decode the request, call the method, encode the reply.

What a method raises becomes the status of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf.message import Message

from elastable.embedding_store.wire.channels.status_codes import answering

__all__ = ["Body", "Handler", "Interceptor", "both_ways", "control", "control_of_client", "stream", "upload"]

Body = Message | bytes
"""A request or reply: a small message, or a frame."""

Request = TypeVar("Request", bound=Message)

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Body, Body]
    Interceptor = grpc.ServerInterceptor[Body, Body]
else:  # gRPC's classes take no types at run time
    Handler, Interceptor = grpc.RpcMethodHandler, grpc.ServerInterceptor


def control(method: Callable[[Request], Message], request: type[Request]) -> Handler:
    """A call of one small message each way."""
    return control_of_client(lambda message, client: method(message), request)


def control_of_client(method: Callable[[Request, str], Message], request: type[Request]) -> Handler:
    """As `control`; the method also takes the address of the client."""

    def answer(message: Request, context: grpc.ServicerContext) -> Message:
        with answering(context):
            return method(message, unquote(context.peer()))

    return grpc.unary_unary_rpc_method_handler(answer, request.FromString, _serialized)


def upload(method: Callable[[Iterator[bytes]], Message]) -> Handler:
    """A call of frames that are answered by one small message."""

    def answer(frames: Iterator[bytes], context: grpc.ServicerContext) -> Message:
        with answering(context):
            return method(frames)

    return grpc.stream_unary_rpc_method_handler(answer, None, _serialized)


def stream(method: Callable[[Request], Iterable[bytes]], request: type[Request]) -> Handler:
    """A call of one small message that is answered by frames."""

    def answer(message: Request, context: grpc.ServicerContext) -> Iterator[bytes]:
        with answering(context):
            yield from method(message)

    return grpc.unary_stream_rpc_method_handler(answer, request.FromString, None)


def both_ways(method: Callable[[Iterator[bytes]], Iterable[bytes]]) -> Handler:
    """A call of frames each way."""

    def answer(frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with answering(context):
            yield from method(frames)

    return grpc.stream_stream_rpc_method_handler(answer)


def _serialized(reply: Message) -> bytes:
    return reply.SerializeToString()
