"""What keeps calls that cost their client nothing from taking a server's threads.

A call of a gRPC server holds a thread from its first byte to its last. So

* a call that waits for a message of its client, or for its client to read, is ended when that takes too long, or comes
  too slowly;
* only some threads may wait for clients: where more do, the call that has waited longest is ended, which among honest
  ones is hardly ever one of them;
* where there is no room, a call takes that of the one that has waited longest for its client;
* each kind of call has a limit of its own, and so does each host: health checks are answered while everything else is
  full, and sessions leave room for work.

Messages are parsed here and not by gRPC, which keeps those that cannot be.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.wire.channels.status_codes import answering
from elastable.embedding_store.wire.server.call_limits import CallLimits
from elastable.embedding_store.wire.server.handlers import Body, Handler, Interceptor

__all__ = ["HEALTH_CHECK", "MAX_CONTROL_BYTES", "CallGuard"]

HEALTH_CHECK = "/grpc.health.v1.Health/Check"
MAX_CONTROL_BYTES = 256 << 10
"""The longest message of a call that takes one message and no frames."""

_REFLECTION = "/grpc.reflection."
_LOOK_S = 0.5  # between two looks at who is late
_FAIR_S = 1.0  # that any call may wait, however many do
_SHORT_S = 0.05  # that any call may wait, where others find no room
_KNOWN = 256  # methods that are remembered; more than there are


@dataclass(frozen=True, slots=True)
class _Kind:
    """Calls that share a limit."""

    name: str
    most: int


class CallGuard(Interceptor):
    """Puts every call of a server behind the limits.

    Args:
        limits: Of the server.
        sessions: Full names of the calls that last as long as their clients.
        spare: Calls that may be under way beside `limits.threads`: health checks, and refusals.
    """

    def __init__(self, limits: CallLimits, sessions: frozenset[str] = frozenset(), spare: int = 16) -> None:
        self._limits = limits
        self._sessions = sessions
        self._health = _Kind("health checks", max(1, spare // 2))
        self._rare = _Kind("questions about services", max(1, spare // 4))
        self._stay = _Kind("sessions", limits.sessions)
        self._work = _Kind("calls", limits.threads)
        self._lock = threading.Lock()
        self._under_way: Counter[str] = Counter()
        self._most_leaving = max(1, spare // 2)
        self._leaving: set[object] = set()  # keys of calls that were ended for others, and hold their room yet
        self._of_host: Counter[str] = Counter()
        self._waits: dict[object, _Wait] = {}  # the one that has waited longest first
        self._guarded: dict[str, Handler] = {}
        self._closed = threading.Event()
        self._looker = threading.Thread(target=self._look, name="elastable-late-calls", daemon=True)
        self._looker.start()

    def close(self) -> None:
        """Calls are waited for again as long as they take. Closing twice is harmless."""
        self._closed.set()

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

    def _kind(self, method: str) -> _Kind:
        if method == HEALTH_CHECK:
            return self._health
        if method.startswith(_REFLECTION):
            return self._rare
        return self._stay if method in self._sessions else self._work

    def _guard(self, method: str, handler: Handler) -> Handler:
        """The same, taking a stream of bytes whatever it took: on the wire that is the same."""
        kind, streams = self._kind(method), handler.request_streaming
        parse = handler.request_deserializer

        def request_of(messages: Iterator[bytes], context: grpc.ServicerContext, place: _Place) -> object:
            taken = self._messages(messages, context, place)
            if not streams:
                return _only(taken, parse, method)
            return taken if parse is None else (_parsed(parse, message) for message in taken)

        if handler.response_streaming:
            replies: Callable[..., Iterator[Body]] | None = handler.stream_stream if streams else handler.unary_stream
            assert replies is not None

            def stream(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Body]:
                with self._admitted(kind, context) as place:
                    with answering(context):
                        request = request_of(messages, context, place)
                    for reply in replies(request, context):
                        with self._waiting(place, context, self._limits.unread_s):
                            yield reply

            return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)
        answer: Callable[..., Body] | None = handler.stream_unary if streams else handler.unary_unary
        assert answer is not None

        def one(messages: Iterator[bytes], context: grpc.ServicerContext) -> Body:
            with self._admitted(kind, context) as place:
                with answering(context):
                    request = request_of(messages, context, place)
                return answer(request, context)

        return grpc.stream_unary_rpc_method_handler(one, None, handler.response_serializer)

    @contextmanager
    def _admitted(self, kind: _Kind, context: grpc.ServicerContext) -> Iterator[_Place]:
        """Around a call that there is room for; others end here, before a message of theirs is read."""
        host = _host(context.peer()) if kind is self._work else ""
        place = _Place(kind, host)
        with self._lock:
            working = self._under_way[self._work.name] + self._under_way[self._stay.name]
            full = self._under_way[kind.name] >= kind.most or (
                kind in (self._work, self._stay) and working >= self._limits.threads
            )
            crowded = bool(host) and self._of_host[host] >= self._limits.of_a_host
            silent = self._most_silent(place, crowded) if full or crowded else None
            if silent is not None or not (full or crowded):
                self._under_way[kind.name] += 1
                if host:
                    self._of_host[host] += 1
        if silent is not None:
            silent.context.cancel()  # type: ignore[no-untyped-call]
        elif full or crowded:
            why = f"{kind.most} {kind.name}" if full else f"{self._limits.of_a_host} calls from {host}"
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{why} are under way here; try again")
        try:
            yield place
        finally:
            with self._lock:
                self._leaving.discard(place)
                self._under_way[kind.name] -= 1
                if host:
                    self._of_host[host] -= 1
                    if not self._of_host[host]:
                        del self._of_host[host]

    def _most_silent(self, place: _Place, of_its_host: bool) -> _Wait | None:
        """The call that has waited longest for its client, and that is to make room for another one of its kind.

        Else whoever opens calls and says nothing takes all room of its host again as fast as it is given back.
        """
        if len(self._leaving) >= self._most_leaving:
            return None
        before = time.monotonic() - _SHORT_S
        for key, wait in self._waits.items():
            if wait.since > before:
                return None
            if wait.place.kind is place.kind and (not of_its_host or wait.place.host == place.host):
                del self._waits[key]
                self._leaving.add(wait.place)
                return wait
        return None

    @contextmanager
    def _waiting(self, place: _Place, context: grpc.ServicerContext, seconds: float) -> Iterator[None]:
        """Around a wait for the client, which is ended after `seconds`, or where too many wait."""
        key, now = object(), time.monotonic()
        with self._lock:
            self._waits[key] = _Wait(place, context, now, now + seconds)
        try:
            yield
        finally:
            with self._lock:
                self._waits.pop(key, None)

    def _messages(self, messages: Iterator[bytes], context: grpc.ServicerContext, place: _Place) -> Iterator[bytes]:
        """A client's messages, as long as they come in time."""
        limits, received, begun, seconds = self._limits, 0, time.monotonic(), self._limits.first_message_s
        while True:
            behind = begun + limits.next_message_s + received / limits.least_rate - time.monotonic()
            with self._waiting(place, context, min(seconds, behind)):
                message = next(messages, None)
            if message is None:
                return
            received += len(message)
            seconds = limits.next_message_s
            yield message

    def _look(self) -> None:
        """Ends late calls until the server is closed, and the oldest where too many wait."""
        while not self._closed.wait(_LOOK_S):
            now = time.monotonic()
            with self._lock:
                ended = [key for key, wait in self._waits.items() if wait.until < now]
                for kind in (self._health, self._rare, self._stay, self._work):
                    alike = [key for key, wait in self._waits.items() if wait.place.kind is kind and key not in ended]
                    surplus = len(alike) - min(kind.most // 2, self._limits.waiting)
                    ended += [key for key in alike[: max(surplus, 0)] if self._waits[key].since < now - _FAIR_S]
                waits = [self._waits.pop(key) for key in ended]
            for wait in waits:
                wait.context.cancel()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """What one call counts as."""

    kind: _Kind
    host: str


@dataclass(frozen=True, slots=True)
class _Wait:
    """One call that waits for its client, since when, and until when it may."""

    place: _Place
    context: grpc.ServicerContext
    since: float
    until: float


def _only(messages: Iterator[bytes], parse: Callable[[bytes], Body] | None, method: str) -> Body:
    """The one message of a call that takes one."""
    message = next(messages, None)
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


def _host(peer: str) -> str:
    """The host of a peer as gRPC names it, `ipv4:127.0.0.1:50051`."""
    return peer.rpartition(":")[0] or peer
