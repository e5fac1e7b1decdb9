"""Where the rows of a schedule lie: templates of `--store`, and what follows from them."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping

__all__ = ["REDIS_SERVERS", "filled_in", "forgets", "in_files", "lasts", "patient", "servers_of", "store_of"]

REDIS_SERVERS = ("redis", "redis2")
"""Names of the Redis servers that a template may hold; "store" is a bare parameter server."""

_REDIS = "redis://{redis}?partitions=4&deadline=2"
_TWO_REDIS = "redis://{redis}?partitions=2&deadline=2", "redis://{redis2}?partitions=2&deadline=2"
_FLUSHED = "redis://{redis}?partitions=4&deadline=2&flush=0.02"
_FILES = "file://{home}/rows?budget=1MiB"
_INDEXED = f"{_FLUSHED}&budget=1MiB&index=redis"
_LOGGED = "memory?log={home}/rows"
_SERVED = "grpc://{store}"

_OF_KIND: dict[str, tuple[str, ...]] = {
    "memory": ("memory",),
    "redis": (_REDIS,),
    "served": (_SERVED,),
    "files": (_FILES,),
    "shards": (f"token:{','.join(_TWO_REDIS)}", f"encoding:{','.join(_TWO_REDIS)}"),
    "index": (_INDEXED,),
    "logged": (_LOGGED, f"{_LOGGED}&log_bytes=64KiB"),
    "every-redis": (_FLUSHED, _REDIS, f"token:{','.join(_TWO_REDIS)}"),
    "flushed": (_FLUSHED, f"{_FILES}&flush=0.02"),
    "every": ("memory", "memory", _FILES, _SERVED, "token:memory,memory"),
}
_SERVER = re.compile(r"\{(redis2?|store)\}")


def store_of(kind: str, seed: int) -> str:
    """The template of a schedule; a chance of its own, so that the faults of older kinds stay what they were."""
    return random.Random(f"{kind}/{seed}/store").choice(_OF_KIND[kind])


def servers_of(template: str) -> tuple[str, ...]:
    """Names of the servers that the store needs, in order."""
    return tuple(dict.fromkeys(_SERVER.findall(template)))


def filled_in(template: str, servers: Mapping[str, str], home: str) -> str:
    """The URL: `servers` gives host:port by name, `home` is the schedule's folder."""
    return template.format(**servers, home=home)


def lasts(template: str) -> bool:
    """Whether the store outlives the master, in Redis or in files, and keeps the record of its versions."""
    named = servers_of(template)
    return template.startswith(("file:", _LOGGED)) or (bool(named) and set(named) <= set(REDIS_SERVERS))


def in_files(template: str) -> bool:
    """Whether the master writes rows, or their changes, to files of its own."""
    return "file:" in template or template.startswith(_LOGGED)


def patient(template: str) -> str:
    """The same store, whose servers may take a minute to answer."""
    return template.replace("deadline=2", "deadline=60")


def forgets(template: str) -> bool:
    """Whether rows lie in a server that loses them when it dies."""
    return "store" in servers_of(template)
