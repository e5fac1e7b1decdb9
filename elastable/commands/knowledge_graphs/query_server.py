"""An HTTP server of JSON requests to one model; plain or TLS, with the tokens of every other server."""

from __future__ import annotations

import hmac
import json
import logging
import socket
import ssl
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from elastable.embedding_store.errors import BadInput, ElastableError
from elastable.embedding_store.support.address import Address, names_this_host
from elastable.embedding_store.support.printable import printable
from elastable.embedding_store.wire.access.credentials import Credentials
from elastable.replicas.knowledge_graphs.trained.query_service import QueryService

__all__ = ["LONGEST_BODY", "MOST_CONNECTIONS", "QueryServer"]

LONGEST_BODY = 8 << 20
"""Bytes of a request's body."""

MOST_CONNECTIONS = 64
"""Connections at once; further ones are closed."""

_SILENT_S = 30.0  # a connection that says nothing for this long is closed
_log = logging.getLogger(__name__)


class QueryServer(ThreadingHTTPServer):
    """Serves `POST /predict`, `/score` and `/neighbors` and `GET /`; a request is a batch, computed at once.

    Args:
        service: Answers requests.
        address: Where to listen; port 0 lets the system choose.
        credentials: A certificate means TLS; tokens of any role are let in.
        insecure: Whether it may be open to everybody who reaches it.

    Raises:
        BadInput: the address cannot be listened at, or the credentials do not fit it.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self, service: QueryService, address: Address, credentials: Credentials, insecure: bool = False
    ) -> None:
        credentials.for_server(address, insecure)  # refuses what would be open, or would show a token
        if credentials.certificate_roles:
            raise BadInput("kg serve knows tokens, not ELASTABLE_CERTIFICATE_ROLES: unset it for this server")
        self.service, self.tokens = service, [token.encode() for token in credentials.tokens]
        #: Only this host reaches it: a page of another site whose name leads here is no client.
        self.local = address.is_loopback and not self.tokens
        self._tls = _tls_of(credentials)
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            super().__init__((address.host, address.port), _Handler)
        except OSError as error:
            raise BadInput(f"{address} cannot be listened at: {error.strerror or error}") from error

    @property
    def address(self) -> Address:
        """Where it listens."""
        return Address(str(self.server_address[0]), int(self.server_address[1]))

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: object) -> None:
        try:
            request.settimeout(_SILENT_S)
            if self._tls is not None:
                request = self._tls.wrap_socket(request, server_side=True)
            super().process_request_thread(request, client_address)
        except OSError as error:  # a handshake that fails, or a client that is gone
            _log.debug("connection of %s ended: %s", client_address, error)
            self.shutdown_request(request)
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        _log.warning("a request of %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: QueryServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "elastable", ""
    timeout = _SILENT_S

    def do_GET(self) -> None:
        if not self._allowed():
            return
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "GET has no body")
        elif self.path == "/":
            self._reply(HTTPStatus.OK, self.server.service.about())
        else:
            self._refuse(HTTPStatus.NOT_FOUND, f"GET / tells of the model; {self._others()}")

    def do_POST(self) -> None:
        if not self._allowed():
            return
        answer = self.server.service.requests.get(self.path.removeprefix("/"))
        if answer is None:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is no such request; {self._others()}")
            return
        body = self._body()
        if body is None:
            return
        try:
            request = json.loads(body)
            if not isinstance(request, dict):
                raise BadInput("a request is a JSON object")
            found = answer(request)
        except (ElastableError, ValueError, RecursionError) as error:
            told = str(error) if isinstance(error, ElastableError) else "the body is not JSON"
            self._refuse(HTTPStatus.BAD_REQUEST, told)
            return
        self._reply(HTTPStatus.OK, found)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        _log.debug("%s", printable(format % args, 1_000, lines=False))

    def _others(self) -> str:
        return "POST to " + ", ".join(f"/{name}" for name in sorted(self.server.service.requests))

    def _allowed(self) -> bool:
        # Every browser says which host it asks.
        if self.server.local and not names_this_host(self.headers.get("Host", "localhost")):
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "call this server by localhost or 127.0.0.1")
            return False
        tokens = self.server.tokens
        shown = (self.headers.get("Authorization") or "").encode("utf-8", "replace")
        scheme, _, token = shown.partition(b" ")
        if not tokens or (scheme.lower() == b"bearer" and any(hmac.compare_digest(token, each) for each in tokens)):
            return True
        self._refuse(HTTPStatus.UNAUTHORIZED, "this server asks for a token: Authorization: Bearer TOKEN")
        return False

    def _body(self) -> bytes | None:
        length, *others = self.headers.get_all("Content-Length", [""])
        unclear = others or "Transfer-Encoding" in self.headers
        if unclear or not (length.isascii() and length.isdigit() and len(length) < 20):
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "a request needs Content-Length")
        elif int(length) > LONGEST_BODY:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has at most {LONGEST_BODY} bytes")
        else:
            return self.rfile.read(int(length))
        return None

    def _refuse(self, status: HTTPStatus, told: str) -> None:
        self.close_connection = True  # its body may not have been read
        self._reply(status, {"error": told})

    def _reply(self, status: HTTPStatus, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)


def _tls_of(credentials: Credentials) -> ssl.SSLContext | None:
    if credentials.certificate is None or credentials.key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(credentials.certificate, credentials.key)
    if credentials.ca is not None:
        context.load_verify_locations(credentials.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
