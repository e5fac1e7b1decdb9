"""The audit log: who made which administrative call, from where, on what, and what came of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from urllib.parse import unquote

import grpc
from google.protobuf import descriptor_pool, text_format
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from elastable.embedding_store.errors import ElastableError, Unauthenticated
from elastable.embedding_store.support.printable import printable
from elastable.embedding_store.wire.access.credentials import Callers
from elastable.embedding_store.wire.server.handlers import Body, Handler, behaviour_of, with_behaviour

__all__ = ["audit", "audited"]

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
            skipped, self._skipped = self._skipped, 0
            return 1 + skipped


_REFUSED = _Budget()


def audited(method: str, handler: Handler, callers: Callers) -> Handler:
    """The handler of a call for administrators alone, which logs each call as it was parsed."""
    call, behaviour = method.rpartition("/")[2], behaviour_of(handler)

    def note(context: grpc.ServicerContext, request: object, outcome: str) -> None:
        try:
            who = callers.of(context).role_and_mark
        except Unauthenticated:  # the check before has let it through
            who = "a stranger"
        audit(call, who, context, _described(method, request), outcome)

    def answer(request: Body | Iterator[bytes], context: grpc.ServicerContext) -> Body:
        seen = request if isinstance(request, Body) else _FirstFrame(request)
        try:
            reply: Body = behaviour(seen, context)
        except BaseException as error:
            why = context.details() or (str(error) if isinstance(error, ElastableError) else repr(error))  # type: ignore[attr-defined]
            note(context, seen, f"failed: {_text(why)}")
            raise
        note(context, seen, "done")
        return reply

    return with_behaviour(handler, answer)


class _FirstFrame:
    """A client's frames, the first of which is kept for the log."""

    def __init__(self, frames: Iterator[bytes]) -> None:
        self._frames = frames
        self.first = b""

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        frame = next(self._frames)
        self.first = self.first or frame
        return frame


def _described(method: str, request: object) -> str:
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
