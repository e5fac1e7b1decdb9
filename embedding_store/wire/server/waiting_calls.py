"""Calls that wait for something to happen on the server, without a thread.

A call whose method returns a `Later` gives its thread back, and a few threads answer such calls as their results come.
What takes microseconds is done by the threads that are there anyway: the one that receives a message, or sets a result.
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
from elastable.embedding_store.wire.server.beginnings import Send, begins_without_blocking, receive_first
from elastable.embedding_store.wire.server.handlers import Body, Handler
from elastable.embedding_store.wire.server.later import Answer, Later, Light
from elastable.embedding_store.wire.server.limits.call_limits import CallLimits
from elastable.embedding_store.wire.server.limits.call_room import CallRoom, Kind, Place

__all__ = ["WaitingCalls"]

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
