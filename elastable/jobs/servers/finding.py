"""Where master and store servers are: one syntax for `--master` and `--stores`, looked at again when one is gone."""

import ipaddress
import re
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from elastable.embedding_store.contract.malformed import UNREADABLE
from elastable.embedding_store.errors import BadInput, ElastableError, Unavailable
from elastable.embedding_store.shards.ownership import position_of
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.support.extras import needs
from elastable.embedding_store.support.store_url import SERVERS, server_addresses
from elastable.embedding_store.wire.pushes.remote_store import ShardClient
from elastable.jobs.servers.store_registry import MOST_SERVERS, StoreRegistry, is_registry

_DNS, _FILE = "dns://", "file://"
_NAME = re.compile(r"dns://(?:([^/?]+)/)?([^/?]+)(?:\?count=(\d{1,4}))?")
_POLL_S = 0.5
_ASKED_S = 2.0  # for an answer of a DNS server, or of one that may be a store server
_MOST_BYTES = 1 << 18  # of a file of addresses


def resolved(host: str, server: Address | None = None) -> Collection[str]:
    """The IP addresses of a host name; none while it has none. IPv4 goes first where it has both.

    Args:
        host: The name.
        server: The DNS server to ask; None: as this machine resolves names.

    Raises:
        NotInstalled: a server is to be asked, and the extra "dns" is not there.
    """
    if server is not None:
        return _asked(host, server)
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return ()
    by_family: dict[int, dict[str, None]] = {}
    for family, _, _, _, where in found:
        by_family.setdefault(family, {})[str(where[0])] = None
    return tuple(by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or ())


def _asked(host: str, server: Address) -> Collection[str]:
    with needs("--stores and --master dns://SERVER/NAME"):
        from dns.exception import DNSException
        from dns.resolver import Resolver
    resolver = Resolver(configure=False)
    resolver.nameservers, resolver.port, resolver.lifetime = [server.host], server.port, _ASKED_S
    for kind in ("A", "AAAA"):
        with suppress(DNSException):
            return [address.to_text() for address in resolver.resolve(host, kind)]
    return ()


@dataclass(frozen=True, slots=True)
class Peers:
    """Where servers of one kind are.

    * `host:port,host:port`: there, in this order.
    * `dns://name:port[?count=N]`: at each address of the name, such as that of a headless service; `count` of them.
      `dns://server:port/name:port` asks that DNS server.
    * `file:///path`: where the file says, addresses with commas or line breaks between, in this order. Whatever knows
      where processes are keeps it up to date, and replaces it whole.
    * `redis://host:port[?count=N]`, of store servers: where they have registered (`StoreRegistry`).

    Attributes:
        text: As given.
        listed: Of the first form.
        name, count, server: Of the second.
        file: Of the third.
        registry: URL of the fourth.
    """

    text: str
    listed: Sequence[str] = ()
    name: Address | None = None
    count: int | None = None
    server: Address | None = None
    file: Path | None = None
    registry: str | None = None

    @classmethod
    def parse(cls, option: str, text: str) -> Self:
        """Reads the value of an option. Raises `BadInput`, which says what is wrong with it."""
        if is_registry(text) and option == "--stores":
            return cls(text, registry=text)
        if text.startswith(_FILE):
            path = text.removeprefix(_FILE)
            if not path.startswith("/") or path.endswith("/"):
                raise BadInput(f"{option} {text}: write file:///path of a file of addresses")
            return cls(text, file=Path(path))
        if not text.startswith(_DNS):
            try:
                return cls(text, server_addresses(SERVERS + text))
            except BadInput as error:
                raise BadInput(f"{option} {text}: {error}") from error
        found = _NAME.fullmatch(text)
        if found is None or not 1 <= int(found[3] or 1) <= MOST_SERVERS:
            raise BadInput(f"{option} {text}: write dns://name:port or dns://name:port?count=N, N from 1 to 1,024")
        try:
            name, server = Address.parse(found[2]), None if found[1] is None else Address.parse(found[1])
            if server is not None:
                ipaddress.ip_address(server.host)
        except ValueError as error:
            raise BadInput(f"{option} {text}: {error}; a DNS server is named by its IP address") from error
        if name.port == 0:
            raise BadInput(f"{option} {text}: port 0 is for listening; name the servers' port")
        return cls(text, name=name, count=None if found[3] is None else int(found[3]), server=server)

    def now(self) -> list[str]:
        """Their addresses as they are now, "" of one that is nowhere; none: nobody knows yet.

        Raises:
            BadInput: the file holds something else.
            ElastableError: the registry does not answer.
        """
        if self.registry is not None:
            with StoreRegistry(self.registry) as registry:
                found = registry.found()
            return [found.get(number) or "" for number in range(max(found, default=-1) + 1)]
        if self.name is not None:
            return [str(Address(host, self.name.port)) for host in resolved(self.name.host, self.server)]
        return list(self.listed) if self.file is None else _read(self.file)

    def wait(self, deadline_s: float) -> list[str]:
        """Their addresses, once there are some, or `count`.

        Args:
            deadline_s: How long that is waited for.

        Raises:
            Unavailable: it is not so by the deadline.
            BadInput: as `now`.
        """
        if self.registry is not None:
            with StoreRegistry(self.registry) as registry:
                return registry.addresses(deadline_s)
        give_up = time.monotonic() + deadline_s
        while not (found := self.now()) or len(found) != (self.count or len(found)):
            if time.monotonic() >= give_up:
                wanted = "" if self.count is None else f"; count= says that there are {self.count}"
                raise Unavailable(
                    f"{self.text} leads to {', '.join(found) or 'nothing'} after {deadline_s:g} s{wanted}"
                )
            time.sleep(min(_POLL_S, deadline_s))
        return found

    def other_than(self, address: str) -> str | None:
        """Where the one server of this kind is, or may be, if it is not at `address` any more; None: nobody knows.

        Raises:
            BadInput: as `now`.
        """
        found = self.now()
        place = found.index(address) + 1 if address in found else 0
        return found[place % len(found)] if found else None


def _read(file: Path) -> list[str]:
    try:
        with file.open("rb") as opened:
            content = opened.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise BadInput(f"it has more than {_MOST_BYTES:,} bytes")
        words = content.decode("ascii").replace(",", " ").split()
        return [str(Address.parse(word)) for word in words]
    except FileNotFoundError:
        return []
    except UNREADABLE as error:
        raise BadInput(f"file of addresses {file}: {error}") from error


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


def find_servers(stores: Sequence[str], deadline_s: float) -> str:
    """The URL of the servers that `--stores` names, by number, once all of them are there.

    Args:
        stores: The words of `Peers`, split at their commas.
        deadline_s: How long they are waited for, and then how long one behind a DNS name may be away.

    Raises:
        Unavailable: some are not there by the deadline.
        BadInput: by their tables the servers of a DNS name are not all of one job; or as `Peers.now`.
    """
    peers = Peers.parse("--stores", ",".join(stores))
    addresses = peers.wait(deadline_s)
    if peers.name is not None:
        with ExitStack() as opened:
            clients = [opened.enter_context(ShardClient(address, deadline_s)) for address in addresses]
            said = {client.address: {position_of(spec) for spec in client.specs().values()} for client in clients}
        addresses = ordered_servers(said)
    return SERVERS + ",".join(addresses)


def server_now(stores: Sequence[str], number: int, known: Sequence[str]) -> str | None:
    """Where a store server is by now that is not reached; None: that is not known.

    Args:
        stores: As of `find_servers`.
        known: Where all servers were last, by number.

    Raises:
        BadInput: as `Peers.now`.
    """
    peers = Peers.parse("--stores", ",".join(stores))
    there = peers.now()
    if peers.name is None:
        return (there[number] or None) if len(there) == len(known) else None
    return next((place for place in there if place not in known and _number_at(place) == number), None)


def _number_at(address: str) -> int | None:
    """The number of a store server, by its tables; None: it does not answer, or has none."""
    with ShardClient(address, _ASKED_S) as client, suppress(ElastableError):
        for spec in client.specs().values():
            if (position := position_of(spec)) is not None:
                return position[0]
    return None
