"""Checks the caller's role before a message of the call is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc

from elastable.embedding_store.errors import PermissionDenied, Unauthenticated
from elastable.embedding_store.wire.access.callers import Caller, Callers
from elastable.embedding_store.wire.access.roles import Role, least_role
from elastable.embedding_store.wire.channels.status_codes import ERROR_KEY
from elastable.embedding_store.wire.server.audit import audit
from elastable.embedding_store.wire.server.beginnings import before_each_call
from elastable.embedding_store.wire.server.call_guard import HEALTH_CHECK
from elastable.embedding_store.wire.server.handlers import Handler, Interceptor

__all__ = ["OPEN_TO_ALL", "AccessCheck"]

OPEN_TO_ALL = HEALTH_CHECK
"""The one call that needs no role."""

_KNOWN = 256  # methods that are remembered; more than there are


class AccessCheck(Interceptor):
    """Ends calls of callers without a role as UNAUTHENTICATED, and those above their role as PERMISSION_DENIED.

    The first interceptor of the server. Handlers of the next one, `CallGuard`, take a stream whatever the call takes.
    """

    def __init__(self, callers: Callers) -> None:
        self._callers = callers
        self._checked: dict[str, Handler] = {}

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The handler of the call behind the check; strangers do not learn which calls are served."""
        method = handler_call_details.method
        if method == OPEN_TO_ALL:
            return continuation(handler_call_details)
        known = self._checked.get(method)
        if known is None:
            handler = continuation(handler_call_details)
            known = self._not_served() if handler is None else self._check(method, handler)
            if handler is not None and len(self._checked) < _KNOWN:
                self._checked[method] = known
        return known

    def _check(self, method: str, handler: Handler) -> Handler:
        least, call = least_role(method), method.rpartition("/")[2]
        return before_each_call(handler, lambda context: self._require(least, call, context))

    def _not_served(self) -> Handler:
        def refuse(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            self._require(Role.READER, "", context)
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            yield b""

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _require(self, least: Role, call: str, context: grpc.ServicerContext) -> None:
        """Returns where the caller may make the call; ends it otherwise."""
        try:
            caller = self._callers.of(context)
        except Unauthenticated as error:
            if least is Role.ADMINISTRATOR:
                audit(call, "a stranger", context, "", f"refused: {error}")
            context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        if caller.role < least:
            why = self._why(caller, least, call)
            if least is Role.ADMINISTRATOR:
                audit(call, caller.told, context, "", f"refused: {why}")
            context.set_trailing_metadata(((ERROR_KEY, PermissionDenied.__name__),))
            context.abort(grpc.StatusCode.PERMISSION_DENIED, why)

    def _why(self, caller: Caller, least: Role, call: str) -> str:
        told = f"{call} is for the role {least.word}, and this caller's is {caller.role.word} ({caller.shown})"
        if self._callers.asks:
            return told
        needed = "ELASTABLE_TOKEN_FILE" if least is Role.ADMINISTRATOR else "ELASTABLE_WORKER_TOKEN_FILE"
        return f"{told}: start the server with {needed}, and give this client the same file"
