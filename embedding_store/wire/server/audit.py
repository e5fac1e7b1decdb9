"""The audit log: who made which administrative call, from where, on what, and what came of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import unquote

import grpc
from google.protobuf import descriptor_pool, text_format
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from elastable.embedding_store.errors import Unauthenticated
from elastable.embedding_store.support.printable import printable
from elastable.embedding_store.wire.access.credentials import Callers, Role, least_role
from elastable.embedding_store.wire.server.call_guard import HEALTH_CHECK
from elastable.embedding_store.wire.server.handlers import Body, Handler, Interceptor

__all__ = ["AuditedCalls", "audit"]

_LOG = logging.getLogger("elastable.audit")
_LONGEST = 400  # characters of each part of a line
_A_SECOND = 20  # refused calls that are logged a second; of the rest, how many there were


def audit(call: str, who: str, context: grpc.ServicerContext, what: str, outcome: str) -> None:
    """Writes one line to the logger `elastable.audit`: at INFO where the call was done, else at WARNING.

    Args:
        call: Name of the call.
        who: The caller's role, and what it is known by.
        context: Of the call; it says from where.
        what: On what; "" where that was not read.
        outcome: "done", or why not.
    """
    done = outcome == "done"
    if not done and not (left_out := _REFUSED.left_out()):
        return
    parts = [printable(part, _LONGEST, lines=False) for part in (who, unquote(context.peer()), what, outcome)]
    parts[2] = parts[2] and f" ({parts[2]})"
    if not done and left_out > 1:
        parts[3] += f"; {left_out - 1} refused calls before it are not in this log"
    _LOG.log(logging.INFO if done else logging.WARNING, "%s by %s from %s%s: %s", call, *parts)


class _Budget:
    """Bounds the lines that callers without a right to anything can have written."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._second = 0
        self._count = 0
        self._skipped = 0

    def left_out(self) -> int:
        """0: write no line; else 1 and the lines left out since the last one that was written."""
        with self._lock:
            if (now := int(time.monotonic())) != self._second:
                self._second, self._count = now, 0
            self._count += 1
            if self._count > _A_SECOND:
                self._skipped += 1
                return 0
            told, self._skipped = 1 + self._skipped, 0
            return told


_REFUSED = _Budget()


_Request = Body | Iterator[bytes]
_Behaviour = Callable[..., Body]


class AuditedCalls(Interceptor):
    """Logs every call that is for administrators alone, once its role was checked, and no health check.

    It stands behind the server's other interceptors, so that it sees requests as they were parsed.
    """

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The handler of the call, with its line in the log."""
        handler, method = continuation(handler_call_details), handler_call_details.method
        if handler is None or handler.response_streaming or method == HEALTH_CHECK:
            return handler
        if least_role(method) is not Role.ADMINISTRATOR:
            return handler
        if handler.request_streaming:
            bulk = self._audited(method, handler.stream_unary)
            return grpc.stream_unary_rpc_method_handler(bulk, handler.request_deserializer, handler.response_serializer)
        control = self._audited(method, handler.unary_unary)
        return grpc.unary_unary_rpc_method_handler(control, handler.request_deserializer, handler.response_serializer)

    def _audited(self, method: str, behaviour: _Behaviour | None) -> _Behaviour:
        assert behaviour is not None
        call = method.rpartition("/")[2]

        def audited(request: _Request, context: grpc.ServicerContext) -> Body:
            seen = request if isinstance(request, Body) else _FirstFrame(request)
            try:
                reply = behaviour(seen, context)
            except BaseException as error:
                told = context.details() or type(error).__name__  # type: ignore[attr-defined]
                self._write(call, context, _told(method, seen), f"failed: {_text(told)}")
                raise
            self._write(call, context, _told(method, seen), "done")
            return reply

        return audited

    def _write(self, call: str, context: grpc.ServicerContext, what: str, outcome: str) -> None:
        try:
            who = self._callers.of(context).told
        except Unauthenticated:  # the check before has let it through
            who = "a stranger"
        audit(call, who, context, what, outcome)


class _FirstFrame:
    """A client's frames, of which the first one is kept until it has been told."""

    def __init__(self, frames: Iterator[bytes]) -> None:
        self._frames = frames
        self.first = b""

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        frame = next(self._frames)
        self.first = self.first or frame
        return frame


def _told(method: str, request: object) -> str:
    """The fields of a request, or those of the header of its first frame, in one line."""
    if isinstance(request, _FirstFrame):
        try:
            described = descriptor_pool.Default().FindMethodByName(method.strip("/").replace("/", "."))
            frame: object = GetMessageClass(described.input_type).FromString(request.first)
        except (KeyError, DecodeError):
            return ""
        request = getattr(frame, "header", None)
    return text_format.MessageToString(request, as_one_line=True) if isinstance(request, Message) else ""


def _text(details: str | bytes) -> str:
    return details.decode("utf-8", "replace") if isinstance(details, bytes) else details
