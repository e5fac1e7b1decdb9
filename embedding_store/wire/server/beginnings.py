"""How calls begin that may wait: without a thread.

gRPC's threaded server lets a handler return before its call has ended (`experimental_non_blocking`, which its own
health service uses): the handler is given a function that sends, to be called later from any thread.

It begins every call in a thread of its pool, which then waits for the message that its one serving thread receives: two
switches of threads and a contest for the interpreter's lock before anything is done. Here the serving thread begins the
call itself, and goes on with it once the message is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import grpc
from grpc import _server as grpc_server
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from elastable.embedding_store.support.futures import at_once
from elastable.embedding_store.wire.server.handlers import Body, Handler

__all__ = ["Send", "at_end_of", "before_each_call", "begins_without_blocking", "holds_no_thread", "receive_first"]

T = TypeVar("T")

Send = Callable[[Body | None], None]
"""Sends one message of an answer, waiting until it is on its way; None: ends the call with its context's status."""

_Begin = Callable[[Iterator[bytes], grpc.ServicerContext, Send], None]

_MARK = "experimental_non_blocking"
_LOG = logging.getLogger(__name__)


class _AtOnce(ThreadPoolExecutor):
    """Does what it is given in the thread that gives it; gRPC takes nothing but a thread pool."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)
        self._done = at_once(None)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Calls it; what it returns is not kept, and it catches what it raises."""
        fn(*args, **kwargs)
        return self._done  # type: ignore[return-value]


_AT_ONCE = _AtOnce()


def begins_without_blocking(begin: _Begin) -> Handler:
    """The handler of a call that is begun by `begin(messages, context, send)`, and ended by `send(None)`.

    gRPC's serving thread calls `begin`, which must not wait for anything.
    """
    setattr(begin, _MARK, True)
    begin.experimental_thread_pool = _AT_ONCE  # type: ignore[attr-defined]
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


def receive_first(context: grpc.ServicerContext, then: Callable[[bytes | None], None]) -> None:
    """Has `then` called by the serving thread once the first message of a call is there; None: there will be none.

    `then` must not wait for anything, least of all for a message to be sent or received: the serving thread does that.
    """
    call, state = context._rpc_event.call, context._state  # type: ignore[attr-defined]
    receive = grpc_server._receive_message(state, call, None)

    def received(event: object) -> object:
        ended = receive(event)
        message, state.request = state.request, None
        try:
            then(message)
        except Exception:  # noqa: BLE001 - the serving thread must go on
            _LOG.exception("unexpected error while receiving a call")
        return ended

    with state.condition:
        operation = cygrpc.ReceiveMessageOperation(grpc_server._EMPTY_FLAGS)
        call.start_server_batch((operation,), received)
        state.due.add(grpc_server._RECEIVE_MESSAGE_TOKEN)
