"""One HTTP request, as tests make it."""

import http.client
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

LIMIT_S = 120.0


@dataclass(frozen=True)
class Answer:
    """What a server answered; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    text: str


def get(
    url: str,
    headers: Mapping[str, str] | None = None,
    method: str = "GET",
    tls: ssl.SSLContext | None = None,
    body: bytes | None = None,
) -> Answer:
    parts = urlsplit(url)
    assert parts.hostname is not None
    if parts.scheme == "https":
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=LIMIT_S, context=tls
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=LIMIT_S)
    try:
        connection.request(method, parts.path or "/", body=body, headers=dict(headers or {}))
        reply = connection.getresponse()
        return Answer(reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read().decode())
    finally:
        connection.close()
