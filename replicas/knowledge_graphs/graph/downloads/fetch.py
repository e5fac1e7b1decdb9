"""Fetches a file over HTTPS: bounded in bytes and in time, and compared with its checksum."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from email.message import Message
from typing import IO
from urllib.parse import urlsplit

from elastable.embedding_store.errors import BadInput, DeadlineExceeded, ElastableError, Unavailable
from elastable.embedding_store.support.address import Address

__all__ = ["ALGORITHMS", "Checksum", "fetch", "require_safe_url"]

ALGORITHMS = ("sha256", "md5")
"""Known checksums. MD5 is all that others have published of some older graphs: it tells a damaged file from a whole
one, and nobody can yet make a file for a given MD5. New checksums should be SHA-256."""

_CHUNK = 1 << 16
_SILENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Checksum:
    """A file's checksum.

    Attributes:
        algorithm: One of `ALGORITHMS`.
        digits: Hexadecimal.

    Raises:
        BadInput: another algorithm, or digits that it cannot have.
    """

    algorithm: str
    digits: str

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise BadInput(f"checksum {self.algorithm!r}: known are {', '.join(ALGORITHMS)}")
        wanted = 2 * hashlib.new(self.algorithm, usedforsecurity=False).digest_size
        if len(self.digits) != wanted or set(self.digits) - set("0123456789abcdef"):
            raise BadInput(f"{self.digits[:80]!r} is no {self.algorithm} checksum of {wanted} hexadecimal digits")

    @classmethod
    def of(cls, content: bytes, algorithm: str = "sha256") -> Checksum:
        """The checksum of these bytes."""
        return cls(algorithm, hashlib.new(algorithm, content, usedforsecurity=False).hexdigest())

    def require(self, content: bytes, what: str) -> None:
        """Raises BadInput unless these bytes have it."""
        found = Checksum.of(content, self.algorithm).digits
        if not hmac.compare_digest(found, self.digits):
            raise BadInput(f"{what}: its {self.algorithm} checksum is {found}; it should be {self.digits}")


def require_safe_url(url: str) -> None:
    """Raises BadInput for a URL that is neither HTTPS nor plain HTTP to this host."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise BadInput(f"{url} is no URL ({error})") from error
    if parts.scheme == "http" and parts.hostname and Address(parts.hostname, 80).is_loopback:
        return
    if parts.scheme != "https" or not parts.hostname:
        raise BadInput(f"{url}: graphs are fetched by https:// (http:// only from this host)")


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirection only to another URL that is safe."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        require_safe_url(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]


def fetch(url: str, most_bytes: int, checksum: Checksum | None = None, deadline_s: float = 600.0) -> bytes:
    """The file at a URL.

    Args:
        url: `https://`, or `http://` of this host. Proxies are those of the environment, for other hosts.
        most_bytes: Bytes that it may have.
        checksum: What it must have; None: any.
        deadline_s: Seconds for all of it; 30 may pass without a byte.

    Raises:
        BadInput: an unsafe URL, a file of more bytes, or of another checksum.
        DeadlineExceeded: it has not come in time.
        Unavailable: the server cannot be reached, or refuses, or breaks off.
    """
    require_safe_url(url)
    plain = urlsplit(url).scheme == "http"
    proxies = [urllib.request.ProxyHandler({})] if plain else []  # this host needs none
    opener = urllib.request.build_opener(_SafeRedirects(), *proxies)
    ends = time.monotonic() + deadline_s
    request = urllib.request.Request(url, headers={"User-Agent": "elastable"})
    try:
        with opener.open(request, timeout=min(_SILENCE_S, deadline_s)) as answer:
            content = _bounded(answer, url, most_bytes, ends)
    except ElastableError:
        raise
    except TimeoutError as error:
        raise DeadlineExceeded(f"{url}: no answer for {_SILENCE_S:g} s") from error
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        if isinstance(getattr(error, "reason", None), TimeoutError):
            raise DeadlineExceeded(f"{url}: no answer for {_SILENCE_S:g} s") from error
        raise Unavailable(f"{url}: cannot be fetched ({error})") from error
    if checksum is not None:
        checksum.require(content, url)
    return content


def _bounded(answer: http.client.HTTPResponse, url: str, most_bytes: int, ends: float) -> bytes:
    announced = answer.headers.get("Content-Length", "")
    if announced.isascii() and announced.isdigit() and int(announced) > most_bytes:
        raise BadInput(f"{url} has {announced} bytes; at most {most_bytes:,} are fetched")
    parts, size = list[bytes](), 0
    while part := answer.read1(_CHUNK):
        size += len(part)
        if size > most_bytes:
            raise BadInput(f"{url} has more than the {most_bytes:,} bytes that are fetched at most")
        if time.monotonic() > ends:
            raise DeadlineExceeded(f"{url}: has not come in time; {size:,} bytes have")
        parts.append(part)
    if announced.isascii() and announced.isdigit() and size != int(announced):
        raise Unavailable(f"{url}: broke off after {size:,} of {announced} bytes")
    return b"".join(parts)
