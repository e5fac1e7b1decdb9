"""Where the store servers of a job are: listed, registered in a Redis, or behind one DNS name."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress

from elastable.embedding_store.errors import ElastableError
from elastable.embedding_store.shards import position_of
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.support.store_url import SERVERS
from elastable.embedding_store.wire.pushes.shard_client import ShardClient
from elastable.jobs.servers.dns_servers import DnsServers, Resolve, is_dns_name, ordered_servers, resolved
from elastable.jobs.servers.store_registry import StoreRegistry, is_registry

__all__ = ["find_servers", "server_now"]

_ASKED_S = 2.0


def find_servers(stores: Sequence[str], deadline_s: float, resolve: Resolve = resolved) -> str:
    """The URL of the servers that `--stores` names, by number, once all of them are there.

    Args:
        stores: What `require_servers` takes.
        deadline_s: How long they are waited for, and then how long one behind a DNS name may be away.
        resolve: Looks a DNS name up.

    Raises:
        Unavailable: some are not there by the deadline; names them.
        BadInput: by their tables the servers of a DNS name are not all of one job.
    """
    url = ",".join(stores)  # a URL of Redis may name several hosts
    if is_dns_name(url):
        return SERVERS + ",".join(_in_order(DnsServers.parse(url).addresses(deadline_s, resolve), deadline_s))
    if not is_registry(url):
        return SERVERS + url
    with StoreRegistry(url) as registry:
        return SERVERS + ",".join(registry.addresses(deadline_s))


def server_now(stores: Sequence[str], number: int, known: Sequence[str], resolve: Resolve = resolved) -> str | None:
    """Where a store server is by now that is not reached; None: that is not known, or `stores` is a list of addresses.

    Args:
        stores: What `require_servers` takes.
        number: Of the server.
        known: Where all servers were last, by number.
        resolve: Looks a DNS name up.

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


def _in_order(addresses: Sequence[str], deadline_s: float) -> list[str]:
    with ExitStack() as opened:
        clients = [opened.enter_context(ShardClient(address, deadline_s)) for address in addresses]
        return ordered_servers({of.address: {position_of(spec) for spec in of.specs().values()} for of in clients})
