"""Keeps calls that cost their client nothing from taking a server's threads (how: docs/decisions.md)."""

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from threading import Lock
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.wire.channels.status_codes import answering
from elastable.embedding_store.wire.server import handlers
from elastable.embedding_store.wire.server.call_room import CallLimits, CallRoom, Kind, Place

HEALTH_CHECK = "/grpc.health.v1.Health/Check"
MAX_CONTROL_BYTES = 256 << 10
"""The longest message of a call that takes one message and no frames."""

_REFLECTION = "/grpc.reflection."


class CallGuard:
    """Puts every call of a server behind the limits, and makes what it raises the status of the call.

    Args:
        limits: Of the server.
        threads: The server's.
        spare: Calls that may be under way above `limits.threads`: health checks, and refusals.
    """

    def __init__(self, limits: CallLimits, threads: ThreadPoolExecutor, spare: int) -> None:
        self._limits = limits
        self._room = CallRoom(limits, spare)
        self._waiting_calls = WaitingCalls(self._room, limits, threads)

    def close(self) -> None:
        """Calls are waited for again as long as they take. Closing twice is harmless."""
        self._waiting_calls.close()
        self._room.close()

    def guarded(
        self, method: str, handler: handlers.Handler, session: bool, waits: bool, brief: bool
    ) -> handlers.Handler:
        """The handler of a call, behind the limits; it takes a stream of bytes, which on the wire is the same.

        Args:
            method: Its full name.
            handler: Without limits.
            session, waits, brief: Whether it is one of those that `Service` names so.
        """
        kind, streams, room = self._kind(method, session), handler.request_streaming, self._room
        parse, behaviour = handler.request_deserializer, handlers.behaviour_of(handler)

        def request_of(
            first: bytes | None, rest: Iterator[bytes], context: grpc.ServicerContext, place: Place
        ) -> object:
            if first is not None:
                room.receive(place, len(first))
            if not streams:
                return _only(first, parse, method)
            taken = () if first is None else chain((first,), self._messages(rest, context, place, len(first)))
            return iter(taken) if parse is None else (_parsed(parse, message) for message in taken)

        if waits:
            return self._waiting_calls.handler(handler, kind, request_of, brief)

        def reply(messages: Iterator[bytes], context: grpc.ServicerContext, place: Place) -> Any:
            with room.waiting(place, context, self._limits.first_message_s):
                first = next(messages, None)
            return behaviour(request_of(first, messages, context, place), context)

        def one(messages: Iterator[bytes], context: grpc.ServicerContext) -> handlers.Body:
            with answering(context), room.entered(kind, context) as place:
                return reply(messages, context, place)  # type: ignore[no-any-return]

        def stream(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[handlers.Body]:
            with answering(context), room.entered(kind, context) as place:
                for message in reply(messages, context, place):
                    with room.waiting(place, context, self._limits.unread_s):
                        yield message

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(one, None, handler.response_serializer)

    def _kind(self, method: str, session: bool) -> Kind:
        if method == HEALTH_CHECK:
            return self._room.health
        if method.startswith(_REFLECTION):
            return self._room.rare
        return self._room.joining if session else self._room.work

    def _messages(
        self, messages: Iterator[bytes], context: grpc.ServicerContext, place: Place, received: int
    ) -> Iterator[bytes]:
        """A client's messages after the first, of `received` bytes, as long as they come in time and find room."""
        limits, begun = self._limits, time.monotonic()
        while True:
            behind = begun + limits.next_message_s + received / limits.least_rate - time.monotonic()
            with self._room.waiting(place, context, min(limits.next_message_s, behind)):
                message = next(messages, None)
            if message is None:
                return
            received += len(message)
            self._room.receive(place, len(message))
            yield message


def _only(message: bytes | None, parse: Callable[[bytes], handlers.Body] | None, method: str) -> handlers.Body:
    """The one message of a call that takes one."""
    if message is None:
        raise BadInput(f"{method}: the call ended before its message")
    if parse is None:
        return message
    if len(message) > MAX_CONTROL_BYTES:
        raise BadInput(f"{method}: a message of {len(message)} bytes; the longest here has {MAX_CONTROL_BYTES}")
    return _parsed(parse, message)


def _parsed(parse: Callable[[bytes], handlers.Body], message: bytes) -> handlers.Body:
    try:
        return parse(message)
    except DecodeError as error:
        raise BadInput(f"a message of {len(message)} bytes is not what this call takes: {error}") from error


# Calls that wait for something to happen on the server, without a thread


_Request = Callable[[bytes | None, Iterator[bytes], grpc.ServicerContext, Place], object]
_Work = Callable[[bytes | None], handlers.Answer]
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
    send: handlers.Send
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

    def handler(self, handler: handlers.Handler, kind: Kind, request_of: _Request, brief: bool) -> handlers.Handler:
        """A handler of one message or frames that may wait.

        Args:
            handler: Whose method may return a `Later`.
            kind: What its calls count as until they wait.
            request_of: Parses the request: its first message, None where the call ended without one, and the rest.
            brief: Whether its method takes microseconds and waits for nothing: no thread need be asked to do it.
        """
        method = handlers.behaviour_of(handler)

        def begin(messages: Iterator[bytes], context: grpc.ServicerContext, send: handlers.Send) -> None:
            with answering(context):
                place = self._room.enter(kind, context)

            def work(first: bytes | None) -> handlers.Answer:
                answer: handlers.Answer = method(request_of(first, messages, context, place), context)
                return answer

            call = _Call(context, send, place, handler.response_streaming, work, brief)
            wait = self._room.begin_wait(place, context, self._limits.first_message_s)
            handlers.receive_first(context, lambda message: self._received(call, wait, message))

        return handlers.begins_without_blocking(begin)

    def _received(self, call: _Call, wait: object, first: bytes | None) -> None:
        """Goes on with a call whose first message is there."""
        self._room.end_wait(wait)
        if first is not None and call.brief and len(first) <= _BRIEF_BYTES:
            self._do(call, lambda: self._answer(call, call.work(first), blocks=False))
        else:
            self._submit(self._working, call, lambda: self._answer(call, call.work(first)))

    def _submit(self, threads: ThreadPoolExecutor, call: _Call, step: Callable[[], None]) -> None:
        """Has another thread take the next step of a call."""
        try:
            threads.submit(self._do, call, step)
        except RuntimeError:  # the server has stopped, and so has the call
            self._end(call)

    def _do(self, call: _Call, step: Callable[[], None]) -> None:
        """Takes a step of a call; what it raises becomes the status of the call."""
        try:
            step()
        except Exception as error:
            self._end(call)
            with suppress(Exception), answering(call.context):
                raise error
            call.send(None)

    def _answer(self, call: _Call, answer: handlers.Answer, blocks: bool = True) -> None:
        """Sends an answer, as far as it is there; what takes long goes to another thread unless this one may block."""
        while isinstance(answer, handlers.Later):
            if answer.first and not blocks:
                self._submit(self._threads, call, partial(self._answer, call, answer))
                return
            for message in answer.first:
                self._send(call, message)
            if not answer.result.done():
                self._park(call, answer)
                return
            if not (blocks or _is_light(answer.light, answer.result)):
                self._submit(self._threads, call, partial(self._answer, call, answer))
                return
            answer = answer.then(answer.result.result())
        if call.streams:
            assert not isinstance(answer, Message | bytes)
            self._stream(call, answer, blocks)
        else:
            assert isinstance(answer, Message | bytes)
            self._end(call)
            handlers.send_last(call.context, _bytes(answer))

    def _stream(self, call: _Call, messages: Iterable[handlers.Body], blocks: bool) -> None:
        rest, only = iter(messages), None
        begun: list[handlers.Body] = [_bytes(message) for message in islice(rest, 1)]
        if begun and len(_bytes(begun[0])) <= _SMALL_BYTES:
            begun += islice(rest, 1)
            only = _bytes(begun.pop()) if len(begun) == 1 else None
        if begun and not blocks:
            self._submit(self._threads, call, partial(self._answer, call, chain(begun, rest)))
            return
        for message in chain(begun, rest):
            self._send(call, message)
        self._end(call)
        if only is None:
            call.send(None)
        else:
            handlers.send_last(call.context, only)

    def _send(self, call: _Call, message: handlers.Body) -> None:
        with self._room.waiting(call.place, call.context, self._limits.unread_s):
            call.send(_bytes(message))

    def _park(self, call: _Call, later: handlers.Later[object]) -> None:
        try:
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

    def _resume(
        self, call: _Call, result: Future[Any], then: Callable[[Any], handlers.Answer], light: handlers.Light[Any]
    ) -> None:
        """Goes on with a call whose result is there."""
        call.result = None
        if call.over or result.cancelled():
            return
        if _is_light(light, result):
            self._do(call, partial(self._go_on, call, result, then, blocks=False))
        else:
            self._submit(self._threads, call, partial(self._go_on, call, result, then))

    def _go_on(
        self, call: _Call, result: Future[Any], then: Callable[[Any], handlers.Answer], blocks: bool = True
    ) -> None:
        with call.lock:
            if call.over:
                return
            self._room.answer(call.place)
        self._answer(call, then(result.result()), blocks)

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


def _is_light(light: handlers.Light[Any], result: Future[Any]) -> bool:
    """Whether an answer of a result that is there can be made and sent by any thread."""
    return light if isinstance(light, bool) else result.exception() is not None or light(result.result())


def _bytes(message: handlers.Body) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
