"""Counts the calls of a gRPC server by method and status code."""

from __future__ import annotations

from collections.abc import Callable

import grpc
from grpc import _server as grpc_server

from elastable.embedding_store.measures.counters import Counts
from elastable.embedding_store.wire.server.beginnings import at_end_of, before_each_call
from elastable.embedding_store.wire.server.handlers import Handler, Interceptor

__all__ = ["OTHER_METHODS", "CallCounts"]

OTHER_METHODS = "other"
"""The method of calls that are not served: their names come from clients."""

_KNOWN = 256  # methods that are remembered; more than there are


class CallCounts(Interceptor):
    """Counts every call when it ends, however it does. The first interceptor of a server.

    Args:
        served: Full names of the methods that are counted by name.
        counts: Where they are counted, by method and name of the status code.
    """

    def __init__(self, served: Callable[[str], bool], counts: Counts) -> None:
        self._served = served
        self._counts = counts
        self._counted: dict[str, tuple[Handler, Handler]] = {}

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The handler of the call, which notes how it ends."""
        handler, method = continuation(handler_call_details), handler_call_details.method
        if handler is None:
            return None
        known = self._counted.get(method)
        if known is None or known[0] is not handler:
            known = handler, self._count(handler, method.lstrip("/") if self._served(method) else OTHER_METHODS)
            if len(self._counted) < _KNOWN:
                self._counted[method] = known
        return known[1]

    def _count(self, handler: Handler, method: str) -> Handler:
        def note(context: grpc.ServicerContext) -> None:
            at_end_of(context, lambda: self._counts.add(method, _code(context)))

        return before_each_call(handler, note)


def _code(context: grpc.ServicerContext) -> str:
    """Name of the status code of a call that has ended."""
    state = context._state  # type: ignore[attr-defined]
    if not state.statused and state.client is grpc_server._CANCELLED:
        return grpc.StatusCode.CANCELLED.name
    code = state.code
    return code.name if isinstance(code, grpc.StatusCode) else grpc.StatusCode.OK.name if code is None else "UNKNOWN"
