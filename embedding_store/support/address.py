"""`host:port` addresses, as `--listen` and `--master` take them."""

import ipaddress
from dataclasses import dataclass, replace
from typing import Self

from elastable.embedding_store.errors import BadInput


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a TCP port.

    Attributes:
        host: A name or an IP address; an IPv6 address without its brackets.
        port: 0 to 65535; 0 lets the system choose, where a server listens.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, address: str) -> Self:
        """The address written as `host:port` or `[ipv6]:port`.

        Raises:
            BadInput: it is written in no such way.
        """
        host, colon, port = address.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if bracketed else host
        if not colon or not host or any(c.isspace() or c in "/[]" for c in host) or (":" in host) != bracketed:
            raise BadInput(f"address {address!r}: write host:port, as in 127.0.0.1:50051 or [::1]:50051")
        if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65_535):
            raise BadInput(f"address {address!r}: port {port!r} is not a number from 0 to 65535")
        return cls(host, int(port))

    def for_this_host(self) -> Self:
        """The address by which processes of this host call a server that listens here: no wildcard."""
        return replace(self, host={"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host))

    @property
    def is_loopback(self) -> bool:
        """Whether it is of this host alone, whatever a resolver says."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"  # any other name is what some resolver says it is

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def names_this_host(host: str) -> bool:
    """Whether the `Host` of an HTTP request is a name of this host, which no page of another site can have it be."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    if name.lower() in ("localhost", ""):
        return bool(name)
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
