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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from threading import Lock
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import _server as grpc_server

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.wire.channels.status_codes import answering
from elastable.embedding_store.wire.server.call_room import CallLimits, CallRoom, Kind, Place
from elastable.embedding_store.wire.server.handlers import (
    Answer,
    Body,
    Handler,
    Interceptor,
    Later,
    Light,
    Send,
    begins_without_blocking,
    receive_first,
)

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


# Calls that wait for something to happen on the server, without a thread


_Request = Callable[[bytes | None, Iterator[bytes], grpc.ServicerContext, Place], object]
_Work = Callable[[bytes | None], Answer]
_SMALL_BYTES = 64 << 10  # of an answer that need not be waited for until it is read
_BRIEF_BYTES = 4 << 10  # of a message that is parsed in no time


@dataclass(slots=True, eq=False)
class _Call:
    """One call, from its first message on.

    Attributes:
        streams: Whether its answer may have several messages.
        work: Makes the answer, of the call's first message.
        brief: Whether `work` takes microseconds and waits for nothing.
        waits: Whether it has waited; `_gone` is then called at its end.
        result: What it waits for now.
        over: Whether its place is given back.
        lock: Guards `over`.
    """

    context: grpc.ServicerContext
    send: Send
    place: Place
    streams: bool
    work: _Work
    brief: bool
    waits: bool = False
    result: Future[Any] | None = None
    over: bool = False
    lock: Lock = field(default_factory=Lock)


class WaitingCalls:
    """The calls of one server whose methods may return a `Later`.

    Args:
        room: Of the server.
        limits: Of the server.
        threads: The server's, in which methods are called.
    """

    def __init__(self, room: CallRoom, limits: CallLimits, threads: ThreadPoolExecutor) -> None:
        self._room = room
        self._limits = limits
        self._working = threads
        self._threads = ThreadPoolExecutor(limits.answering, "answers")

    def close(self) -> None:
        """Ends the threads, once what they do is done."""
        self._threads.shutdown(wait=False)

    def handler(self, handler: Handler, kind: Kind, request_of: _Request, brief: bool) -> Handler:
        """A handler of one message or frames that may wait.

        Args:
            handler: Whose method may return a `Later`.
            kind: What its calls count as until they wait.
            request_of: Parses the request: its first message, None where the call ended without one, and the rest.
            brief: Whether its method takes microseconds and waits for nothing: no thread need be asked to do it.
        """
        method: Callable[..., Any] | None = (
            (handler.stream_stream if handler.request_streaming else handler.unary_stream)
            if handler.response_streaming
            else (handler.stream_unary if handler.request_streaming else handler.unary_unary)
        )
        assert method is not None

        def begin(messages: Iterator[bytes], context: grpc.ServicerContext, send: Send) -> None:
            with answering(context):
                place = self._room.enter(kind, context)

            def work(first: bytes | None) -> Answer:
                answer: Answer = method(request_of(first, messages, context, place), context)
                return answer

            call = _Call(context, send, place, handler.response_streaming, work, brief)
            wait = self._room.begin_wait(place, context, self._limits.first_message_s)
            receive_first(context, lambda message: self._received(call, wait, message))

        return begins_without_blocking(begin)

    def _received(self, call: _Call, wait: object, first: bytes | None) -> None:
        """Goes on with a call whose first message is there."""
        self._room.end_wait(wait)
        if first is not None and call.brief and len(first) <= _BRIEF_BYTES:
            self._begin(call, first, blocks=False)
            return
        try:
            self._working.submit(self._begin, call, first)
        except RuntimeError:  # the server has stopped, and so has the call
            self._end(call)

    def _begin(self, call: _Call, first: bytes | None, blocks: bool = True) -> None:
        try:
            self._answer(call, call.work(first), blocks)
        except Exception as error:  # noqa: BLE001 - it becomes the status of the call
            self._end(call)
            _fail(call, error)

    def _answer(self, call: _Call, answer: Answer, blocks: bool = True) -> None:
        """Sends an answer, as far as it is there; what takes long goes to another thread unless this one may block."""
        while isinstance(answer, Later):
            if answer.first and not blocks:
                self._hand_over(call, answer)
                return
            for message in answer.first:
                self._send(call, message)
            if not answer.result.done():
                self._park(call, answer)
                return
            if not (blocks or _is_light(answer.light, answer.result)):
                self._hand_over(call, answer)
                return
            with answering(call.context):
                answer = answer.then(answer.result.result())
        if call.streams:
            assert not isinstance(answer, Message | bytes)
            self._stream(call, answer, blocks)
        else:
            assert isinstance(answer, Message | bytes)
            self._end(call)
            _send_last(call.context, _bytes(answer))

    def _hand_over(self, call: _Call, answer: Answer) -> None:
        """Has another thread send an answer."""

        def go_on() -> None:
            try:
                self._answer(call, answer)
            except Exception as error:  # noqa: BLE001 - it becomes the status of the call
                self._end(call)
                _fail(call, error)

        try:
            self._threads.submit(go_on)
        except RuntimeError:  # the server has stopped, and so has the call
            self._end(call)

    def _stream(self, call: _Call, messages: Iterable[Body], blocks: bool) -> None:
        only = None
        with answering(call.context):
            rest = iter(messages)
            begun: list[Body] = [_bytes(message) for message in islice(rest, 1)]
            if begun and len(_bytes(begun[0])) <= _SMALL_BYTES:
                begun += islice(rest, 1)
                only = _bytes(begun.pop()) if len(begun) == 1 else None
            if begun and not blocks:
                self._hand_over(call, chain(begun, rest))
                return
            for message in chain(begun, rest):
                self._send(call, message)
        self._end(call)
        if only is None:
            call.send(None)
        else:
            _send_last(call.context, only)

    def _send(self, call: _Call, message: Body) -> None:
        with self._room.waiting(call.place, call.context, self._limits.unread_s):
            call.send(_bytes(message))

    def _park(self, call: _Call, later: Later[object]) -> None:
        try:
            with answering(call.context):
                self._room.park(call.place)
        except BaseException:
            later.result.cancel()
            raise
        first, call.waits = not call.waits, True
        call.result = later.result
        # Where the call is over by now, nobody else would say so.
        if first and not call.context.add_callback(lambda: self._gone(call)):
            self._gone(call)
        if call.over:
            later.result.cancel()
        # Futures keep their callbacks. Neither this one nor the call leads back to the result once it is there: a cycle
        # would keep some fifty objects of every call until Python's collector finds them among those of all workers.
        then, light = later.then, later.light
        later.result.add_done_callback(lambda result: self._resume(call, result, then, light))

    def _resume(self, call: _Call, result: Future[Any], then: Callable[[Any], Answer], light: Light[Any]) -> None:
        """Goes on with a call whose result is there."""
        call.result = None
        if call.over or result.cancelled():
            return
        if _is_light(light, result):
            self._go_on(call, result, then, blocks=False)
            return
        with suppress(RuntimeError):  # the server has stopped, and so has the call
            self._threads.submit(self._go_on, call, result, then)

    def _go_on(self, call: _Call, result: Future[Any], then: Callable[[Any], Answer], blocks: bool = True) -> None:
        try:
            with call.lock:
                if call.over:
                    return
                self._room.answer(call.place)
            with answering(call.context):
                answer = then(result.result())
            self._answer(call, answer, blocks)
        except Exception as error:  # noqa: BLE001 - it becomes the status of the call
            self._end(call)
            _fail(call, error)

    def _gone(self, call: _Call) -> None:
        """The call is over, answered or not."""
        self._end(call)
        if (result := call.result) is not None:
            result.cancel()

    def _end(self, call: _Call) -> None:
        with call.lock:
            if call.over:
                return
            call.over = True
        self._room.leave(call.place)


def _is_light(light: Light[Any], result: Future[Any]) -> bool:
    """Whether an answer of a result that is there can be made and sent by any thread."""
    return light if isinstance(light, bool) else result.exception() is not None or light(result.result())


def _fail(call: _Call, error: Exception) -> None:
    """Ends a call with the status that its context was told, else with that of the error."""
    if not call.context._state.aborted:  # type: ignore[attr-defined]
        with suppress(Exception), answering(call.context):
            raise error
    call.send(None)


def _bytes(message: Body) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


def _send_last(context: grpc.ServicerContext, message: bytes) -> None:
    """Sends the only message of an answer and its status at once, as gRPC does for calls of one message.

    `send` would wait until the message is on its way, and send the status after it.
    """
    grpc_server._status(context._rpc_event, context._state, message)  # type: ignore[attr-defined]
