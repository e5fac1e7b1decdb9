"""Spans of the calls that a gRPC server answers, where the client says which span they belong to."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc

from elastable.embedding_store.measures.spans import TRACE_KEY, Tracer
from elastable.embedding_store.wire.server.beginnings import at_end_of, before_each_call
from elastable.embedding_store.wire.server.handlers import Body, Handler, Interceptor

__all__ = ["TracedCalls"]


class TracedCalls(Interceptor):
    """Makes a span of every call that comes from one; it stands before whatever makes a call wait.

    Args:
        served: Full names of the methods that are traced.
        tracer: Makes the spans.
    """

    def __init__(self, served: Callable[[str], bool], tracer: Tracer) -> None:
        self._served, self._tracer = served, tracer

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The handler of the call, within its span."""
        handler, method = continuation(handler_call_details), handler_call_details.method
        if handler is None or not self._served(method):
            return handler
        shown = [value for key, value in handler_call_details.invocation_metadata or () if key == TRACE_KEY]
        if len(shown) != 1 or not isinstance(shown[0], str):
            return handler
        return _traced(handler, method.lstrip("/"), shown[0], self._tracer)


def _traced(handler: Handler, method: str, parent: str, tracer: Tracer) -> Handler:
    answer = handler.stream_unary
    if answer is None:
        return before_each_call(handler, lambda context: at_end_of(context, tracer.begin_serving(method, parent)))

    def within_span(messages: Iterator[bytes], context: grpc.ServicerContext) -> Body:
        with tracer.serving(method, parent):
            return answer(messages, context)

    return grpc.stream_unary_rpc_method_handler(within_span, None, handler.response_serializer)
