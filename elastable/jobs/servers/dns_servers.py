"""Store servers behind one DNS name: its addresses, in the order that the servers' tables say."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from elastable.embedding_store.errors import BadInput, Unavailable
from elastable.embedding_store.support.address import Address
from elastable.jobs.servers.store_registry import MOST_SERVERS

__all__ = ["DnsServers", "is_dns_name", "ordered_servers", "resolved"]

_SCHEME = "dns://"
_URL = re.compile(r"dns://([^/?]+)\?count=(\d{1,4})")
_POLL_S = 0.5

Resolve = Callable[[str], Collection[str]]
"""Host name -> its IP addresses now."""


def is_dns_name(url: str) -> bool:
    """Whether this is a DNS name of all store servers, and not a list of addresses."""
    return url.startswith(_SCHEME)


def resolved(host: str) -> Collection[str]:
    """The IP addresses of a host name; none while it has none. IPv4 goes first where it has both."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return ()
    by_family: dict[int, dict[str, None]] = {}
    for family, _, _, _, where in found:
        by_family.setdefault(family, {})[str(where[0])] = None
    return tuple(by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or ())


@dataclass(frozen=True, slots=True)
class DnsServers:
    """`dns://name:port?count=N`: a name, such as that of a headless service, which has the addresses of N servers.

    Attributes:
        name: The name, and the port of all servers.
        count: How many there are.
    """

    name: Address
    count: int

    @classmethod
    def parse(cls, url: str) -> Self:
        """Reads a URL. Raises `BadInput`, which says what is wrong with it."""
        found = _URL.fullmatch(url)
        if found is None or not 1 <= int(found[2]) <= MOST_SERVERS:
            raise BadInput(
                f"--stores {url}: write dns://name:port?count=N, N from 1 to {MOST_SERVERS:,}: while servers start, "
                "a name has fewer addresses than there will be"
            )
        name = Address.parse(found[1])
        if name.port == 0:
            raise BadInput(f"--stores {url}: port 0 is for listening; name the servers' port")
        return cls(name, int(found[2]))

    def addresses(self, deadline_s: float, resolve: Resolve = resolved) -> list[str]:
        """Where the servers are, in no order, once the name has as many addresses as there are servers.

        Args:
            deadline_s: How long that is waited for.
            resolve: Looks a name up.

        Raises:
            Unavailable: it has more or fewer by the deadline.
        """
        give_up = time.monotonic() + deadline_s
        while len(hosts := resolve(self.name.host)) != self.count:
            if time.monotonic() >= give_up:
                raise Unavailable(
                    f"{self.name.host} resolves to {', '.join(sorted(hosts)) or 'nothing'} after {deadline_s:g} s, and "
                    f"count= says that there are {self.count} store servers"
                )
            time.sleep(_POLL_S)
        return [str(Address(host, self.name.port)) for host in hosts]


def ordered_servers(said: Mapping[str, Collection[tuple[int, int] | None]]) -> list[str]:
    """The servers by number. Those without tables hold nothing yet: they get the numbers that are left, by address.

    Args:
        said: Address -> the positions (`position_of`) of its tables.

    Raises:
        BadInput: tables are not of so many servers, or two servers have one number.
    """
    count, taken = len(said), dict[int, str]()
    empty: list[str] = []
    for address, positions in sorted(said.items()):
        if not positions:
            empty.append(address)
            continue
        known = {position for position in positions if position is not None}
        if len(known) != 1 or None in positions or next(iter(known))[1] != count:
            raise BadInput(f"store server {address} has tables {_told(known)}, and {count} servers are given (count=)")
        ((number, _),) = known
        if number in taken:
            raise BadInput(f"store servers {taken[number]} and {address} both have the tables of number {number}")
        taken[number] = address
    left: Sequence[int] = [number for number in range(count) if number not in taken]
    taken.update(zip(left, empty, strict=True))
    return [taken[number] for number in range(count)]


def _told(positions: Collection[tuple[int, int]]) -> str:
    return ", ".join(f"of number {number} of {of}" for number, of in sorted(positions)) or "of no store server"
