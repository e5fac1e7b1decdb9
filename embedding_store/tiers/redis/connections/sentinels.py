"""Sentinels asked for the master that they watch, through redis-py."""

from __future__ import annotations

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from elastable.embedding_store.errors import Unavailable
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.tiers.redis.connections.redis_connection import Deadline
from elastable.embedding_store.tiers.redis.url import RedisUrl

__all__ = ["master_address"]


def master_address(url: RedisUrl, deadline: Deadline) -> Address:
    """Where the master is, as the first Sentinel says that knows one which is up.

    Args:
        url: With a service.
        deadline: Each Sentinel gets its share of what is left.

    Raises:
        Unavailable: none knows one now; says of each why.
        DeadlineExceeded: the deadline has passed.
    """
    why: list[str] = []
    for tried, seed in enumerate(url.seeds):
        share = deadline.left(seed) / (len(url.seeds) - tried)
        try:
            return _asked(url, seed, share)
        except MasterNotFoundError as error:
            _, _, cause = str(error).rpartition(" - ")
            unknown = f"it knows no master {url.service!r} that is up"
            why.append(f"{seed}: {cause if ' - ' in str(error) else unknown}")
        except redis.RedisError as error:
            why.append(f"{seed}: {error}")
    raise Unavailable(
        f"no Sentinel of {url} names a master (a login of Sentinels is given by ELASTABLE_SENTINEL_USER and "
        f"ELASTABLE_SENTINEL_PASSWORD_FILE): {'; '.join(why)}"
    )


def _asked(url: RedisUrl, seed: Address, seconds: float) -> Address:
    user, password = url.sentinel_login
    options: dict[str, object] = {
        "username": user or None,
        "password": password or None,
        "socket_timeout": seconds,
        "socket_connect_timeout": seconds,
        "retry": Retry(NoBackoff(), 0),
        "ssl": url.tls,
        **({"ssl_ca_certs": url.ca} if url.tls and url.ca else {}),
    }
    watching = Sentinel([(seed.host, seed.port)], sentinel_kwargs=options)  # type: ignore[no-untyped-call]
    try:
        host, port = watching.discover_master(url.service)  # type: ignore[no-untyped-call]
    finally:
        for sentinel in watching.sentinels:
            sentinel.close()
    return Address(str(host), int(port))
