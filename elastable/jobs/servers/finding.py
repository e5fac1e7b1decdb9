"""Where the store servers of a job are: listed, registered in a Redis, or behind one DNS name."""

import re
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Self

from elastable.embedding_store.errors import BadInput, ElastableError, Unavailable
from elastable.embedding_store.shards.ownership import position_of
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.support.store_url import SERVERS
from elastable.embedding_store.wire.pushes.shard_client import ShardClient
from elastable.jobs.servers.store_registry import MOST_SERVERS, StoreRegistry, is_registry

# Store servers behind one DNS name: its addresses, in the order that the servers' tables say


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
            whose = ", ".join(f"of number {number} of {of}" for number, of in sorted(known)) or "of no store server"
            raise BadInput(f"store server {address} has tables {whose}, and {count} servers are given (count=)")
        ((number, _),) = known
        if number in taken:
            raise BadInput(f"store servers {taken[number]} and {address} both have the tables of number {number}")
        taken[number] = address
    left: Sequence[int] = [number for number in range(count) if number not in taken]
    taken.update(zip(left, empty, strict=True))
    return [taken[number] for number in range(count)]


_ASKED_S = 2.0


def find_servers(stores: Sequence[str], deadline_s: float, resolve: Resolve = resolved) -> str:
    """The URL of the servers that `--stores` names, by number, once all of them are there.

    Args:
        stores: What `require_servers` takes.
        deadline_s: How long they are waited for, and then how long one behind a DNS name may be away.

    Raises:
        Unavailable: some are not there by the deadline; names them.
        BadInput: by their tables the servers of a DNS name are not all of one job.
    """
    url = ",".join(stores)  # a URL of Redis may name several hosts
    if is_dns_name(url):
        addresses = DnsServers.parse(url).addresses(deadline_s, resolve)
        with ExitStack() as opened:
            clients = [opened.enter_context(ShardClient(address, deadline_s)) for address in addresses]
            said = {client.address: {position_of(spec) for spec in client.specs().values()} for client in clients}
        return SERVERS + ",".join(ordered_servers(said))
    if not is_registry(url):
        return SERVERS + url
    with StoreRegistry(url) as registry:
        return SERVERS + ",".join(registry.addresses(deadline_s))


def server_now(stores: Sequence[str], number: int, known: Sequence[str], resolve: Resolve = resolved) -> str | None:
    """Where a store server is by now that is not reached; None: that is not known, or `stores` is a list of addresses.

    Args:
        stores: What `require_servers` takes.
        known: Where all servers were last, by number.

    Raises:
        ElastableError: the registry does not answer.
    """
    url = ",".join(stores)
    if is_registry(url):
        with StoreRegistry(url) as registry:
            return registry.found().get(number)
    if not is_dns_name(url):
        return None
    name = DnsServers.parse(url).name
    there = [str(Address(host, name.port)) for host in resolve(name.host)]
    return next((place for place in there if place not in known and _number_at(place) == number), None)


def _number_at(address: str) -> int | None:
    """The number of a store server, by its tables; None: it does not answer, or has none."""
    with ShardClient(address, _ASKED_S) as client, suppress(ElastableError):
        for spec in client.specs().values():
            if (position := position_of(spec)) is not None:
                return position[0]
    return None
