"""An HTTP server in a thread of a process that does something else: bounded, plain or TLS."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from elastable.embedding_store.closing import Closing
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.wire.access.credentials import Credentials
from elastable.monitoring.access import Access

__all__ = ["MOST_CONNECTIONS", "HttpServer", "require_servable"]

MOST_CONNECTIONS = 64
"""Connections at once; further ones are closed."""

_REQUEST_S = 10.0  # for the head of a request, from the connection or the answer before on
_LONGEST_HEAD = 16 << 10  # bytes
_STOP_S = 5.0


class _BoundedProtocol(H11Protocol):
    """One connection, which is closed where no request comes in time, however slowly its bytes drip."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
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


class _Server(uvicorn.Server):
    """Says when it serves."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.serving = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self.serving.set()


class HttpServer(Closing):
    """Serves an ASGI application from construction to `close`.

    Args:
        address: Where to listen; port 0 takes a free one.
        app: Answers requests that `Access` lets through.
        credentials: A certificate means TLS; a token of any role is needed where there is one.
        insecure: Whether it may be open to everybody who reaches it.

    Attributes:
        address: Where it listens, the port taken.
        url: The same, for people.

    Raises:
        BadInput: the address cannot be listened on, or the credentials do not fit it.
    """

    def __init__(self, address: Address, app: ASGIApp, credentials: Credentials, insecure: bool = False) -> None:
        listening = _listening(address, credentials, insecure)
        self.address = Address(address.host, listening.getsockname()[1])
        self.url = f"{'http' if credentials.certificate is None else 'https'}://{self.address.for_this_host()}/"
        guarded = Access(app, credentials.tokens, address.is_loopback and not credentials.tokens)
        self._server = _Server(_config(guarded, credentials))
        self._thread = threading.Thread(
            target=self._server.run, args=([listening],), name="elastable-http", daemon=True
        )
        self._thread.start()
        while not self._server.serving.wait(0.1):
            if not self._thread.is_alive():
                raise BadInput(f"nothing can be served over HTTP at {address}; see the log")

    def close(self) -> None:
        """Takes no more requests, and ends those under way. Closing twice is harmless."""
        self._server.should_exit = True
        self._thread.join(_STOP_S + 5.0)


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
        return socket.create_server((address.host, address.port), family=family, backlog=MOST_CONNECTIONS)
    except OSError as error:
        raise BadInput(f"cannot listen on {address} for HTTP: {error.strerror or error}") from error
