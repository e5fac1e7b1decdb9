"""Who may see what over HTTP: tokens, the names that a server is called by, and what browsers may do with answers."""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from elastable.embedding_store.support.address import names_this_host

__all__ = ["ALLOWED", "Access"]

ALLOWED = "elastable.allowed"
"""Key of an ASGI scope: whether the caller may see more than that the process lives."""

_PROBES = ("/healthz", "/readyz")
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Access:
    """Lets requests through that may be answered, and no others.

    `/healthz` and `/readyz` are answered to everybody, as gRPC's health check is, and say no more than yes or no to
    those without a token. A browser that is asked for a password sends the token as one, so a token is part of no
    address.

    Args:
        app: Answers the requests.
        tokens: Any of them is enough; none: nobody needs one.
        local: Whether only this host reaches the server. Then it must be called by a name of this host: a page of
            another site whose name leads here is no client.
    """

    def __init__(self, app: ASGIApp, tokens: Collection[str], local: bool) -> None:
        self._app = app
        self._tokens = [token.encode() for token in tokens]
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await refusal(scope, receive, _with_headers(send))
            return
        scope[ALLOWED] = self._knows_token(headers)
        if not scope[ALLOWED] and scope["path"] not in _PROBES:
            asks = {"WWW-Authenticate": 'Basic realm="Elastable: the password is the token", charset="UTF-8"'}
            told = "this server asks for a token: Authorization: Bearer TOKEN; in a browser, as the password\n"
            await PlainTextResponse(told, 401, asks)(scope, receive, _with_headers(send))
            return
        await self._app(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope, headers: Headers) -> PlainTextResponse | None:
        """The answer to a request that nobody may make."""
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("GET and HEAD are all there is\n", 405, {"Allow": "GET, HEAD"})
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            return PlainTextResponse("requests have no body\n", 413, {"Connection": "close"})
        if self._local and not names_this_host(headers.get("host", "")):
            return PlainTextResponse("call this server by localhost or 127.0.0.1\n", 421)
        return None

    def _knows_token(self, headers: Headers) -> bool:
        if not self._tokens:
            return True
        shown = _shown_token(headers.get("authorization", ""))
        known = [hmac.compare_digest(shown, token) for token in self._tokens]
        return any(known)


def _shown_token(authorization: str) -> bytes:
    """The token of `Bearer TOKEN`, or of `Basic`, whose password it is."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() != "basic":
        return value.strip().encode("utf-8", "replace") if scheme.lower() == "bearer" else b""
    try:
        return base64.b64decode(value, validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return b""


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sending
