"""An HTTP server in a thread of a process that does something else: bounded, plain or TLS."""

import asyncio
import base64
import binascii
import hmac
import logging
import socket
import ssl
import threading
import time
from collections.abc import Mapping

import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from elastable.embedding_store.closing import Closing
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.support.address import Address, names_this_host
from elastable.embedding_store.wire.access.credentials import Credentials, Role
from elastable.embedding_store.wire.server.connections import CountedPort, Standing, bounds_here

_KIND = "HTTP"  # of listener, of `LISTENERS`
_BACKLOG = 64
_REQUEST_S = 10.0  # for the head of a request, from the connection or the answer before on
_LONGEST_HEAD = 16 << 10  # bytes
_STOP_S = 5.0
_POLL_S = 0.01


class _BoundedProtocol(H11Protocol):
    """One connection, which is closed where no request comes in time, however slowly its bytes drip.

    How many there may be: `CountedPort`.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Not set by asyncio, as the listening socket does not name its protocol: head and body are written apart, and
        # the second would wait for the client's delayed acknowledgement of the first.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > bounds_here(_KIND).cap:
            transport.abort()
        else:
            self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._expect_nothing()

    def on_response_complete(self) -> None:
        self._expect_request()
        super().on_response_complete()

    def _expect_request(self) -> None:
        self._expect_nothing()
        self._deadline = self.loop.call_later(_REQUEST_S, self.transport.abort)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class HttpServer(Closing):
    """Serves an ASGI application from construction to `close`.

    Args:
        address: Where to listen; port 0 takes a free one.
        app: Answers requests that `Access` lets through.
        credentials: A certificate means TLS; a token of any role is needed where there is one.
        insecure: Whether it may be open to everybody who reaches it.
        posts: Whether requests may have bodies, which `app` bounds.

    Attributes:
        address: Where it listens, the port taken.
        url: The same, for people.

    Raises:
        BadInput: the address cannot be listened on, or the credentials do not fit it.
    """

    def __init__(
        self, address: Address, app: ASGIApp, credentials: Credentials, insecure: bool = False, posts: bool = False
    ) -> None:
        listening = _listening(address, credentials, insecure)
        self.address = Address(address.host, listening.getsockname()[1])
        self.url = f"{'http' if credentials.certificate is None else 'https'}://{self.address.for_this_host()}/"
        self._connections = CountedPort(_KIND)
        local = address.is_loopback and not credentials.tokens
        guarded = Access(app, credentials.tokens, local, self._connections, posts)
        self._server = uvicorn.Server(_config(guarded, credentials))
        self._thread = threading.Thread(
            target=self._server.run, args=([listening],), name="elastable-http", daemon=True
        )
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise BadInput(f"nothing can be served over HTTP at {address}; see the log")
            time.sleep(_POLL_S)
        self._connections.begin(self.address.port)

    def close(self) -> None:
        """Takes no more requests, and ends those under way. Closing twice is harmless."""
        self._server.should_exit = True
        self._thread.join(_STOP_S + 5.0)
        self._connections.close()


def _config(app: ASGIApp, credentials: Credentials) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_BoundedProtocol,
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        log_level=logging.ERROR,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=_LONGEST_HEAD,
        timeout_graceful_shutdown=int(_STOP_S),
        ssl_certfile=credentials.certificate,
        ssl_keyfile=credentials.key,
        ssl_ca_certs=None if credentials.ca is None else str(credentials.ca),
        ssl_cert_reqs=ssl.CERT_NONE if credentials.ca is None else ssl.CERT_REQUIRED,
    )


def require_servable(address: Address, credentials: Credentials, insecure: bool = False) -> None:
    """Raises what `HttpServer` would raise here and now, for those who serve later."""
    _listening(address, credentials, insecure).close()


def _listening(address: Address, credentials: Credentials, insecure: bool) -> socket.socket:
    credentials.for_server(address, insecure)  # refuses what would be open, or would show a token
    if credentials.certificate_roles:
        raise BadInput("--http knows tokens, not ELASTABLE_CERTIFICATE_ROLES: unset it, or leave --http out")
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise BadInput(f"cannot listen on {address} for HTTP: {error.strerror or error}") from error


# Who may see what over HTTP: tokens, the names that a server is called by, and what browsers may do with answers


ALLOWED = "elastable.allowed"
"""Key of an ASGI scope: whether the caller may see more than that the process lives."""

ROLE = "elastable.role"
"""Key of an ASGI scope: the `Role` of the caller's token, None without it; where nobody needs one, a worker's."""

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
        tokens: Token -> role. Any of them is enough to see; none: nobody needs one.
        local: Whether only this host reaches the server. Then it must be called by a name of this host: a page of
            another site whose name leads here is no client.
        connections: Is told who asks.
        posts: Whether POST is a method, and requests may have bodies.
    """

    def __init__(
        self, app: ASGIApp, tokens: Mapping[str, Role], local: bool, connections: CountedPort, posts: bool = False
    ) -> None:
        self._app, self._connections, self._posts = app, connections, posts
        self._tokens = {token.encode(): role for token, role in tokens.items()}
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await refusal(scope, receive, _with_headers(send))
            return
        shown = _shown_token(headers.get("authorization", ""))
        known = [role for token, role in self._tokens.items() if hmac.compare_digest(shown, token)]  # all, in one time
        scope[ALLOWED] = not self._tokens or bool(known)
        scope[ROLE] = max(known, default=None if self._tokens else Role.WORKER)
        if scope["client"] is not None:
            host, port = scope["client"]
            self._connections.heard(f"ip:{host}:{port}", Standing.KNOWN if scope[ALLOWED] else Standing.SILENT)
        if not scope[ALLOWED] and scope["path"] not in _PROBES:
            asks = {"WWW-Authenticate": 'Basic realm="Elastable: the password is the token", charset="UTF-8"'}
            message = "this server asks for a token: Authorization: Bearer TOKEN; in a browser, as the password\n"
            await PlainTextResponse(message, 401, asks)(scope, receive, _with_headers(send))
            return
        await self._app(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope, headers: Headers) -> PlainTextResponse | None:
        """The answer to a request that nobody may make."""
        methods = ("GET", "HEAD", "POST") if self._posts else ("GET", "HEAD")
        if scope["method"] not in methods:
            allowed = ", ".join(methods)
            return PlainTextResponse(f"{allowed} are all there is\n", 405, {"Allow": allowed})
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if has_body and scope["method"] != "POST":
            return PlainTextResponse("requests have no body\n", 413, {"Connection": "close"})
        if self._local and not names_this_host(headers.get("host", "")):
            return PlainTextResponse("call this server by localhost or 127.0.0.1\n", 421)
        return None


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
