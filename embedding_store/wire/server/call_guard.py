"""What keeps calls that cost their client nothing from taking a server's threads.

A call of a gRPC server holds a thread from its first byte to its last, unless it waits for something to happen here
(`waiting_calls`). So

* a call that waits for a message of its client, or for its client to read, is ended when that takes too long, or comes
  too slowly;
* only some threads may wait for clients: where more do, the call that has waited longest is ended, which among honest
  ones is hardly ever one of them;
* where there is no room, a call takes that of the one that has waited longest for its client;
* each kind of call has a limit of its own, and so do each host and each client: health checks are answered while
  everything else is full.

Messages are parsed here and not by gRPC, which keeps those that cannot be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import grpc
from google.protobuf.message import DecodeError

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.wire.channels.status_codes import answering
from elastable.embedding_store.wire.server.handlers import Body, Handler, Interceptor
from elastable.embedding_store.wire.server.limits.call_limits import CallLimits
from elastable.embedding_store.wire.server.limits.call_room import CallRoom, Kind, Place
from elastable.embedding_store.wire.server.waiting_calls import WaitingCalls

__all__ = ["HEALTH_CHECK", "MAX_CONTROL_BYTES", "CallGuard"]

HEALTH_CHECK = "/grpc.health.v1.Health/Check"
MAX_CONTROL_BYTES = 256 << 10
"""The longest message of a call that takes one message and no frames."""

_REFLECTION = "/grpc.reflection."
_KNOWN = 256  # methods that are remembered; more than there are


class CallGuard(Interceptor):
    """Puts every call of a server behind the limits.

    Args:
        limits: Of the server.
        threads: The server's.
        sessions: Full names of the calls that last as long as their clients.
        waiting: Full names of the other calls that may wait for something to happen here.
        brief: Full names of those among them that need no thread; see `Service`.
        spare: Calls that may be under way beside `limits.threads`: health checks, and refusals.
    """

    def __init__(
        self,
        limits: CallLimits,
        threads: ThreadPoolExecutor,
        sessions: frozenset[str] = frozenset(),
        waiting: frozenset[str] = frozenset(),
        brief: frozenset[str] = frozenset(),
        spare: int = 16,
    ) -> None:
        self._limits = limits
        self._sessions = sessions
        self._may_wait = sessions | waiting
        self._brief = brief
        self._room = CallRoom(limits, spare)
        self._waiting_calls = WaitingCalls(self._room, limits, threads)
        self._guarded: dict[str, Handler] = {}

    def close(self) -> None:
        """Calls are waited for again as long as they take. Closing twice is harmless."""
        self._waiting_calls.close()
        self._room.close()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The handler of a call that is served, guarded."""
        method = handler_call_details.method
        known = self._guarded.get(method)
        if known is None:
            handler = continuation(handler_call_details)
            if handler is None:
                return None
            known = self._guard(method, handler)
            if len(self._guarded) < _KNOWN:
                self._guarded[method] = known
        return known

    def _kind(self, method: str) -> Kind:
        if method == HEALTH_CHECK:
            return self._room.health
        if method.startswith(_REFLECTION):
            return self._room.rare
        return self._room.joining if method in self._sessions else self._room.work

    def _guard(self, method: str, handler: Handler) -> Handler:
        """The same, taking a stream of bytes whatever it took: on the wire that is the same."""
        kind, streams, room = self._kind(method), handler.request_streaming, self._room
        parse = handler.request_deserializer

        def request_of(messages: Iterator[bytes], context: grpc.ServicerContext, place: Place) -> object:
            with answering(context):
                taken = self._messages(messages, context, place)
                if not streams:
                    return _only(next(taken, None), parse, method)
                return taken if parse is None else (_parsed(parse, message) for message in taken)

        def request_from(
            first: bytes | None, rest: Iterator[bytes], context: grpc.ServicerContext, place: Place
        ) -> object:
            with answering(context):
                if first is not None:
                    room.receive(place, len(first))
                if not streams:
                    return _only(first, parse, method)
                more = iter(()) if first is None else self._messages(rest, context, place, len(first))
                taken = more if first is None else chain((first,), more)
                return taken if parse is None else (_parsed(parse, message) for message in taken)

        if method in self._may_wait:
            return self._waiting_calls.handler(handler, kind, request_from, method in self._brief)
        if handler.response_streaming:
            replies: Callable[..., Iterator[Body]] | None = handler.stream_stream if streams else handler.unary_stream
            assert replies is not None

            def stream(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Body]:
                with answering(context):
                    place = room.enter(kind, context)
                try:
                    for reply in replies(request_of(messages, context, place), context):
                        with room.waiting(place, context, self._limits.unread_s):
                            yield reply
                finally:
                    room.leave(place)

            return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)
        answer: Callable[..., Body] | None = handler.stream_unary if streams else handler.unary_unary
        assert answer is not None

        def one(messages: Iterator[bytes], context: grpc.ServicerContext) -> Body:
            with answering(context):
                place = room.enter(kind, context)
            try:
                return answer(request_of(messages, context, place), context)
            finally:
                room.leave(place)

        return grpc.stream_unary_rpc_method_handler(one, None, handler.response_serializer)

    def _messages(
        self, messages: Iterator[bytes], context: grpc.ServicerContext, place: Place, received: int | None = None
    ) -> Iterator[bytes]:
        """A client's messages, as long as they come in time, and there is room for them.

        Args:
            messages: As they come.
            context: Of the call.
            place: Where they are counted.
            received: Bytes of the first message, where that came before these; None: it is the first of these.
        """
        limits, begun = self._limits, time.monotonic()
        seconds = limits.first_message_s if received is None else limits.next_message_s
        received = received or 0
        while True:
            behind = begun + limits.next_message_s + received / limits.least_rate - time.monotonic()
            with self._room.waiting(place, context, min(seconds, behind)):
                message = next(messages, None)
            if message is None:
                return
            received += len(message)
            self._room.receive(place, len(message))
            seconds = limits.next_message_s
            yield message


def _only(message: bytes | None, parse: Callable[[bytes], Body] | None, method: str) -> Body:
    """The one message of a call that takes one."""
    if message is None:
        raise BadInput(f"{method}: the call ended before its message")
    if parse is None:
        return message
    if len(message) > MAX_CONTROL_BYTES:
        raise BadInput(f"{method}: a message of {len(message)} bytes; the longest here has {MAX_CONTROL_BYTES}")
    return _parsed(parse, message)


def _parsed(parse: Callable[[bytes], Body], message: bytes) -> Body:
    try:
        return parse(message)
    except DecodeError as error:
        raise BadInput(f"a message of {len(message)} bytes is not what this call takes: {error}") from error
