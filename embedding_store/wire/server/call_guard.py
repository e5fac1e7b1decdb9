"""Keeps calls that cost their client nothing from taking a server's threads (how: docs/decisions.md)."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from threading import Lock
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.wire.channels.status_codes import answering
from elastable.embedding_store.wire.messages.frames import REQUEST_KEY
from elastable.embedding_store.wire.server import handlers
from elastable.embedding_store.wire.server.call_room import Call, CallLimits, CallRoom, Kind

HEALTH_CHECK = "/grpc.health.v1.Health/Check"
MAX_CONTROL_BYTES = 256 << 10
"""The longest message of a call that takes one message and no frames."""

_SMALL_BYTES = 16 << 10  # of an answer; those are bounded by the number of streams
_REFLECTION = "/grpc.reflection."
_Send = Callable[[bytes | None], None]  # of one message of an answer, until it is on its way; None ends the call


class CallGuard:
    """Puts every call of a server behind the limits, and makes what it raises the status of the call.

    Args:
        limits: Of the server.
        spare: Calls that may be under way above `limits.threads`: health checks, and refusals.
    """

    def __init__(self, limits: CallLimits, spare: int) -> None:
        self._limits = limits
        self._room = CallRoom(limits, spare)
        self._answering = ThreadPoolExecutor(limits.answering, "answers")

    def close(self) -> None:
        """Calls are waited for again as long as they take. Closing twice is harmless."""
        self._answering.shutdown(wait=False)
        self._room.close()

    def guarded(
        self, method: str, handler: handlers.Handler, begin: Callable[[Call], None], session: bool, waits: bool
    ) -> handlers.Handler:
        """The handler of a call, behind the limits; it takes a stream of bytes, which on the wire is the same.

        Args:
            method: Its full name.
            handler: Without limits.
            begin: Called with each call first; it ends those of callers who may not make them.
            session: Whether it is one of those that `Service` names so.
            waits: Whether it may return a `Later`; it answers with a stream, or `Service` says so.
        """
        kind, room, behaviour = self._kind(method, session), self._room, handlers.behaviour_of(handler)

        def begun(context: grpc.ServicerContext) -> Call:
            begin(call := room.call(kind, context))
            return call

        def answer(messages: Iterator[bytes], call: Call) -> Any:
            return behaviour(self._request(messages, call, handler, method), call.context)

        def one(messages: Iterator[bytes], context: grpc.ServicerContext) -> handlers.Body:
            call = begun(context)
            with answering(context):
                room.enter(call)
                try:
                    reply: handlers.Body = answer(messages, call)
                    if isinstance(reply, bytes) and len(reply) > _SMALL_BYTES:
                        room.answered(call, len(reply))
                    call.answered = True
                    return reply
                finally:
                    room.leave(call)

        def later(messages: Iterator[bytes], context: grpc.ServicerContext, send: _Send) -> None:
            call = begun(context)
            with answering(context):
                room.enter(call)
                waiting = _WaitingCall(call, send, handler.response_streaming)
                try:
                    self._answer(waiting, answer(messages, call))
                except BaseException:
                    self._end(waiting)
                    raise

        if waits:
            # gRPC's hook for calls that hold no thread: such a method returns at once, and answers by `send`.
            later.experimental_non_blocking = True  # type: ignore[attr-defined]
            return grpc.stream_stream_rpc_method_handler(later)
        return grpc.stream_unary_rpc_method_handler(one, None, handler.response_serializer)

    def _kind(self, method: str, session: bool) -> Kind:
        if method == HEALTH_CHECK:
            return self._room.health
        if method.startswith(_REFLECTION):
            return self._room.rare
        return self._room.joining if session else self._room.work

    def _request(
        self, messages: Iterator[bytes], call: Call, handler: handlers.Handler, method: str
    ) -> handlers.Body | Iterator[handlers.Body]:
        """What the method takes, once the first message is there: with the call itself, or after it."""
        parse = handler.request_deserializer
        sent: Any = {} if handler.request_streaming else dict(call.context.invocation_metadata())
        first: bytes | None = sent.get(REQUEST_KEY)
        if first is None:
            with self._room.waiting(call, self._limits.first_message_s):
                first = next(messages, None)
        if first is not None:
            self._room.receive(call, len(first))
        if not handler.request_streaming:
            return _only(first, parse, method)
        taken = iter(()) if first is None else chain((first,), self._rest(messages, call, len(first)))
        return taken if parse is None else (_parsed(parse, message) for message in taken)

    def _rest(self, messages: Iterator[bytes], call: Call, received: int) -> Iterator[bytes]:
        """A client's messages after the first, of `received` bytes, as long as they come in time and find room."""
        limits, begun = self._limits, time.monotonic()
        while True:
            behind = begun + limits.next_message_s + received / limits.least_rate - time.monotonic()
            with self._room.waiting(call, min(limits.next_message_s, behind)):
                message = next(messages, None)
            if message is None:
                return
            received += len(message)
            self._room.receive(call, len(message))
            yield message

    # Calls that wait for something to happen on the server, without a thread

    def _answer(self, waiting: "_WaitingCall", answer: handlers.Answer) -> None:
        """Sends an answer, as far as it is there."""
        while isinstance(answer, handlers.Later):
            for message in answer.first:
                self._send(waiting, message, _Reading(self._limits))
            if not answer.result.done():
                self._park(waiting, answer)
                return
            answer = answer.then(answer.result.result())
        messages: Any = answer if waiting.streams else (answer,)
        reading = _Reading(self._limits)
        for message in messages:
            self._send(waiting, message, reading)
            if not waiting.call.context.is_active():  # its client is gone
                break
        waiting.call.answered = True
        self._end(waiting)
        waiting.send(None)

    def _send(self, waiting: "_WaitingCall", message: handlers.Body, reading: "_Reading") -> None:
        with reading.of(message, waiting.call, self._room):
            waiting.send(message if isinstance(message, bytes) else message.SerializeToString())

    def _park(self, waiting: "_WaitingCall", later: handlers.Later[object]) -> None:
        try:
            self._room.park(waiting.call)
        except BaseException:
            later.result.cancel()
            raise
        first, waiting.has_waited = not waiting.has_waited, True
        waiting.result = later.result
        # Where the call is over by now, nobody else would say so.
        if first and not waiting.call.context.add_callback(lambda: self._gone(waiting)):
            self._gone(waiting)
        if waiting.over:
            later.result.cancel()
        # Futures keep their callbacks. Neither this one nor the call leads back to the result once it is there: a cycle
        # would keep some fifty objects of every call until Python's collector finds them among those of all workers.
        then = later.then
        later.result.add_done_callback(lambda result: self._resume(waiting, result, then))

    def _resume(self, waiting: "_WaitingCall", result: Future[Any], then: Callable[[Any], handlers.Answer]) -> None:
        """Has another thread go on with a call whose result is there."""
        waiting.result = None
        if waiting.over or result.cancelled():
            return
        try:
            self._answering.submit(self._go_on, waiting, result, then)
        except RuntimeError:  # the server has stopped, and so has the call
            self._end(waiting)

    def _go_on(self, waiting: "_WaitingCall", result: Future[Any], then: Callable[[Any], handlers.Answer]) -> None:
        """What is raised becomes the status of the call."""
        with waiting.lock:
            if waiting.over:
                return
            self._room.answer(waiting.call)
        try:
            self._answer(waiting, then(result.result()))
        except Exception as error:
            self._end(waiting)
            with suppress(Exception), answering(waiting.call.context):
                raise error
            waiting.send(None)

    def _gone(self, waiting: "_WaitingCall") -> None:
        """The call is over, answered or not."""
        self._end(waiting)
        if (result := waiting.result) is not None:
            result.cancel()

    def _end(self, waiting: "_WaitingCall") -> None:
        with waiting.lock:
            if waiting.over:
                return
            waiting.over = True
        self._room.leave(waiting.call)


@dataclass(slots=True, eq=False)
class _WaitingCall:
    """A call that may wait.

    Attributes:
        streams: Whether its answer may have several messages.
        has_waited: Whether `_gone` is called at its end.
        result: What it waits for now.
        over: Whether its room is given back.
        lock: Guards `over`.
    """

    call: Call
    send: _Send
    streams: bool
    has_waited: bool = False
    result: Future[Any] | None = None
    over: bool = False
    lock: Lock = field(default_factory=Lock)


class _Reading:
    """How a client reads one answer: for how long it was waited for, and how much was sent."""

    def __init__(self, limits: CallLimits) -> None:
        self._limits = limits
        self._waited, self._sent = 0.0, 0

    @contextmanager
    def of(self, message: handlers.Body, call: Call, room: CallRoom) -> Iterator[None]:
        """Around the sending of one more message."""
        limits, begun = self._limits, time.monotonic()
        size = len(message) if isinstance(message, bytes) else message.ByteSize()
        self._sent += size
        late = limits.unread_s + self._sent / limits.least_rate - self._waited
        with room.sending(call, size if size > _SMALL_BYTES else 0, min(limits.unread_s, late)):
            yield
        self._waited += time.monotonic() - begun


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
