"""Calls that wait for something to happen on the server, without a thread.

gRPC's threaded server lets a handler return before its call has ended (`experimental_non_blocking`, which its own
health service uses): the handler is given a function that sends, to be called later from any thread. So a call whose
method returns a `Later` gives its thread back, and a few threads answer such calls as their results come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from threading import Lock
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc import _server as grpc_server

from elastable.embedding_store.wire.channels.status_codes import answering
from elastable.embedding_store.wire.server.handlers import Body, Handler
from elastable.embedding_store.wire.server.later import Answer, Later
from elastable.embedding_store.wire.server.limits.call_limits import CallLimits
from elastable.embedding_store.wire.server.limits.call_room import CallRoom, Kind, Place

__all__ = ["Send", "WaitingCalls", "at_end_of", "before_each_call", "begins_without_blocking", "holds_no_thread"]

Send = Callable[[Body | None], None]
"""Sends one message of an answer, waiting until it is on its way; None: ends the call with its context's status."""

_Request = Callable[[Iterator[bytes], grpc.ServicerContext, Place], object]
_Begin = Callable[[Iterator[bytes], grpc.ServicerContext, Send], None]
_MARK = "experimental_non_blocking"
_SMALL_BYTES = 64 << 10  # of an answer that need not be waited for until it is read


def begins_without_blocking(begin: _Begin) -> Handler:
    """The handler of a call that is begun by `begin(messages, context, send)`, and ended by `send(None)`."""
    setattr(begin, _MARK, True)
    return grpc.stream_stream_rpc_method_handler(begin)


def holds_no_thread(handler: Handler) -> bool:
    """Whether it is such a handler."""
    return getattr(handler.stream_stream, _MARK, False)


def before_each_call(handler: Handler, do: Callable[[grpc.ServicerContext], None]) -> Handler:
    """The handler of a call of frames, with `do(context)` before whatever the call does."""
    answer, replies = handler.stream_unary, handler.stream_stream
    if holds_no_thread(handler):
        begin: Callable[..., Any] | None = replies
        assert begin is not None

        def begun(messages: Iterator[bytes], context: grpc.ServicerContext, send: Send) -> None:
            do(context)
            begin(messages, context, send)

        return begins_without_blocking(begun)
    if handler.response_streaming:
        assert replies is not None

        def stream(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Body]:
            do(context)
            return replies(messages, context)

        return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)
    assert answer is not None

    def one(messages: Iterator[bytes], context: grpc.ServicerContext) -> Body:
        do(context)
        return answer(messages, context)

    return grpc.stream_unary_rpc_method_handler(one, None, handler.response_serializer)


def at_end_of(context: grpc.ServicerContext, do: Callable[[], None]) -> None:
    """Calls `do()` once the call has ended, however it does."""
    if not context.add_callback(do):  # its client is gone already
        do()


@dataclass(slots=True, eq=False)
class _Call:
    """One call, from its first message on.

    Attributes:
        streams: Whether its answer may have several messages.
        waits: Whether it has waited; `_gone` is then called at its end.
        result: What it waits for now.
        over: Whether its place is given back.
        lock: Guards `over`.
    """

    context: grpc.ServicerContext
    send: Send
    place: Place
    streams: bool
    waits: bool = False
    result: Future[Any] | None = None
    over: bool = False
    lock: Lock = field(default_factory=Lock)


class WaitingCalls:
    """The calls of one server whose methods may return a `Later`.

    Args:
        room: Of the server.
        limits: Of the server.
    """

    def __init__(self, room: CallRoom, limits: CallLimits) -> None:
        self._room = room
        self._limits = limits
        self._threads = ThreadPoolExecutor(limits.answering, "answers")

    def close(self) -> None:
        """Ends the threads, once what they do is done."""
        self._threads.shutdown(wait=False)

    def handler(self, handler: Handler, kind: Kind, request_of: _Request) -> Handler:
        """A handler of one message or frames that may wait.

        Args:
            handler: Whose method may return a `Later`.
            kind: What its calls count as until they wait.
            request_of: Reads and parses the request.
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
            call = _Call(context, send, place, handler.response_streaming)
            try:
                self._answer(call, method(request_of(messages, context, place), context))
            except BaseException:
                self._end(call)
                raise

        return begins_without_blocking(begin)

    def _answer(self, call: _Call, answer: Answer) -> None:
        """Sends an answer, as far as it is there."""
        while isinstance(answer, Later):
            for message in answer.first:
                self._send(call, message)
            if not answer.result.done():
                self._park(call, answer)
                return
            with answering(call.context):
                answer = answer.then(answer.result.result())
        if call.streams:
            assert not isinstance(answer, Message | bytes)
            self._stream(call, answer)
        else:
            assert isinstance(answer, Message | bytes)
            self._end(call)
            _send_last(call.context, _bytes(answer))

    def _stream(self, call: _Call, messages: Iterable[Body]) -> None:
        only = None
        with answering(call.context):
            rest = iter(messages)
            begun: list[Body] = [_bytes(message) for message in islice(rest, 1)]
            if begun and len(_bytes(begun[0])) <= _SMALL_BYTES:
                begun += islice(rest, 1)
                only = _bytes(begun.pop()) if len(begun) == 1 else None
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

    def _resume(self, call: _Call, result: Future[Any], then: Callable[[Any], Answer], light: bool) -> None:
        """Goes on with a call whose result is there."""
        call.result = None
        if call.over or result.cancelled():
            return
        if light:
            self._go_on(call, result, then)
            return
        with suppress(RuntimeError):  # the server has stopped, and so has the call
            self._threads.submit(self._go_on, call, result, then)

    def _go_on(self, call: _Call, result: Future[Any], then: Callable[[Any], Answer]) -> None:
        try:
            with call.lock:
                if call.over:
                    return
                self._room.answer(call.place)
            with answering(call.context):
                answer = then(result.result())
            self._answer(call, answer)
        except Exception:  # noqa: BLE001 - `answering` has told the context what it was; the client may also be gone
            self._end(call)
            call.send(None)

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


def _bytes(message: Body) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


def _send_last(context: grpc.ServicerContext, message: bytes) -> None:
    """Sends the only message of an answer and its status at once, as gRPC does for calls of one message.

    `send` would wait until the message is on its way, and send the status after it.
    """
    grpc_server._status(context._rpc_event, context._state, message)  # type: ignore[attr-defined]
