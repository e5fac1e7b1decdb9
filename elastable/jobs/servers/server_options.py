"""The settings of the commands that serve: parameter servers and store servers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.option import check_options, setting
from elastable.embedding_store.support.store_url import SERVERS, byte_count, server_addresses
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.jobs.servers.finding import DnsServers, is_dns_name
from elastable.jobs.servers.store_registry import is_registry
from elastable.jobs.shared_options import (
    CLIENT_BYTES,
    CLIENT_CALLS,
    CLIENT_RATE,
    HTTP,
    INSECURE,
    LISTEN,
    NOT_FINITE,
    STORE_URL,
    TRANSPORT,
    check_addresses,
    client_limits,
    deadline,
    of_network,
    of_store,
)

__all__ = ["ServerOptions", "StoreServerOptions", "require_own_store", "require_servers"]


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Settings of `elastable serve`.

    Raises:
        BadInput: a value that is not allowed.
    """

    store: str = setting("memory", STORE_URL)
    not_finite: str = setting("refuse", NOT_FINITE)
    deadline_s: float = setting(60.0, deadline("How long a commit is retried while the store fails."))
    transport: str = setting("auto", TRANSPORT)
    insecure: bool = setting(False, INSECURE)
    listen: str = setting("127.0.0.1:50051", LISTEN)
    http: str | None = setting(None, HTTP)
    client_calls: int = setting(128, CLIENT_CALLS)
    client_bytes: str | None = setting(None, CLIENT_BYTES)
    client_rate: int | None = setting(None, CLIENT_RATE)

    def __post_init__(self) -> None:
        check_options(self)
        client_limits(self.client_calls, self.client_bytes, self.client_rate)
        check_addresses(listen=self.listen, http=self.http)


@dataclass(frozen=True, slots=True)
class StoreServerOptions:
    """Settings of `elastable store`.

    Raises:
        BadInput: a value that is not allowed, or a store that is split over several places.
    """

    store: str = setting("memory", STORE_URL)
    gradient_bytes: str = setting(
        "1GiB",
        of_store("Memory for gradients of the version in work; workers wait where there is no room.", metavar="SIZE"),
    )
    register: str | None = setting(
        None,
        of_store(
            "Announce this server in a Redis, under a number: it keeps its rows in store-NUMBER of --store.",
            metavar="URL", unset="masters name its address",
        ),
    )  # fmt: skip
    number: int | None = setting(
        None,
        of_store(
            "Number of this server, from 0, with --register.", at_least=0,
            unset="the one that this host had last, else the lowest that is free",
        ),
    )  # fmt: skip
    advertise: str | None = setting(
        None,
        of_network(
            "Where masters and workers call this server, with --register.", metavar="HOST:PORT",
            unset="--listen, or this host's name and the port",
        ),
    )  # fmt: skip
    transport: str = setting("auto", TRANSPORT)
    insecure: bool = setting(False, INSECURE)
    listen: str = setting("127.0.0.1:50061", LISTEN)
    http: str | None = setting(None, HTTP)
    client_calls: int = setting(128, CLIENT_CALLS)
    client_bytes: str | None = setting(None, CLIENT_BYTES)
    client_rate: int | None = setting(None, CLIENT_RATE)

    def __post_init__(self) -> None:
        check_options(self)
        client_limits(self.client_calls, self.client_bytes, self.client_rate)
        check_addresses(listen=self.listen, http=self.http)
        byte_count(self.gradient_bytes)
        require_own_store(self.store)
        if self.register is None and (self.number is not None or self.advertise is not None):
            raise BadInput("--number and --advertise need --register: the Redis in which the server is announced")


def require_servers(stores: Sequence[str]) -> None:
    """Raises `BadInput` where `--stores`, split at its commas, can name no store servers."""
    url = ",".join(stores)
    if is_dns_name(url):
        DnsServers.parse(url)
    elif not is_registry(url):
        server_addresses(SERVERS + url)


def require_own_store(url: str) -> None:
    """Raises `BadInput` unless a store server can keep its rows in the store at this URL."""
    if not re.match(r"memory($|\?)|file:|rediss?(\+sentinel)?:", url):
        raise BadInput(
            f"--store {redacted(url)}: a store server keeps its own rows: write memory, memory?log=/folder, "
            "file:///folder or redis://host:port"
        )
