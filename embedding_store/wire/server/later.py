"""Answers that come later: what a call returns that waits without a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from elastable.embedding_store.wire.channels.status_codes import answering
from elastable.embedding_store.wire.server.handlers import Body, Handler

__all__ = ["Answer", "Later", "Light", "both_ways_later", "control_later"]

T = TypeVar("T")
Request = TypeVar("Request", bound=Message)


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
    then: Callable[[T], Answer]
    first: tuple[Body, ...] = ()
    light: Light[T] = False


Light = bool | Callable[[T], bool]
Answer = Body | Iterable[Body] | Later[Any]


def control_later(method: Callable[[Request], Later[T]], request: type[Request]) -> Handler:
    """A call of one small message each way, whose answer may come later."""

    def answer(message: Request, context: grpc.ServicerContext) -> Later[T]:
        with answering(context):
            return method(message)

    return grpc.unary_unary_rpc_method_handler(answer, request.FromString)


def both_ways_later(method: Callable[[Iterator[bytes]], Later[T]]) -> Handler:
    """A call of frames each way, whose answer may come later."""

    def answer(frames: Iterator[bytes], context: grpc.ServicerContext) -> Later[T]:
        with answering(context):
            return method(frames)

    return grpc.stream_stream_rpc_method_handler(answer)
