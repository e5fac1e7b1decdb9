"""A secret on every call: a client's channel sends it as `authorization: Bearer TOKEN`, a server checks it."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import grpc

from elastable.embedding_store.rpc.call_channel import CallChannel
from elastable.embedding_store.rpc.call_guard import HEALTH_CHECK

__all__ = ["OPEN_TO_ALL", "TokenChannel", "TokenCheck"]

_KEY = "authorization"
_SCHEME = "bearer"

OPEN_TO_ALL = HEALTH_CHECK
"""The one call without a token."""


class TokenChannel(CallChannel):
    """Sends a token with every call on a channel, which is closed with this one."""

    def __init__(self, channel: grpc.Channel, token: str) -> None:
        super().__init__([channel])
        self._entry = (_KEY, f"Bearer {token}")

    def made(self, calls: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
        """A call with the token among its metadata."""
        (made,), entry = calls, self._entry

        def call(*arguments: Any, metadata: Iterable[tuple[str, str]] | None = None, **options: Any) -> Any:
            return made(*arguments, metadata=(entry, *(metadata or ())), **options)

        return call


class TokenCheck(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Lets calls with the token through, and health checks; others end with UNAUTHENTICATED before they are read."""

    def __init__(self, token: str) -> None:
        self._token = token.encode("ascii")

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler of the call, or one that refuses it and says what is missing."""
        if handler_call_details.method == OPEN_TO_ALL:
            return continuation(handler_call_details)
        shown = [value for key, value in handler_call_details.invocation_metadata if key == _KEY]
        if len(shown) != 1:
            return _refusing("it shows no token, and this server asks for one (ELASTABLE_TOKEN_FILE)")
        if not self._is_ours(shown[0]):
            return _refusing("its token is not this server's (ELASTABLE_TOKEN_FILE)")
        return continuation(handler_call_details)

    def _is_ours(self, shown: str | bytes) -> bool:
        scheme, _, token = (shown.encode() if isinstance(shown, str) else shown).partition(b" ")
        return hmac.compare_digest(token, self._token) and scheme.decode("ascii", "replace").lower() == _SCHEME


def _refusing(why: str) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler for calls of any shape: one that takes a stream waits for no message."""

    def refuse(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, why)
        yield b""

    return grpc.stream_stream_rpc_method_handler(refuse)
