"""Where the rows of a schedule lie: templates of `--store`, and what follows from them."""

import random
import re
from collections.abc import Mapping

REDIS_SERVERS = ("redis", "redis2")
"""Names of single Redis servers that a template may hold."""

CLUSTER = ("node0", "node1", "node2")
"""Nodes of a Redis Cluster."""

PRIMARY_AND_REPLICA = ("primary", "replica")
"""Two Redis servers, by what they are at first, watched by three Sentinels, "sentinel0" to "sentinel2"."""

SERVICE = "service"
"""What the two are to whoever asks a Sentinel."""

_KEPT_IN = " with "  # what follows is no part of the URL
_REDIS = "redis://{redis}?partitions=4&deadline=2"
_TWO_REDIS = "redis://{redis}?partitions=2&deadline=2", "redis://{redis2}?partitions=2&deadline=2"
_FLUSHED = "redis://{redis}?partitions=4&deadline=2&flush=0.02"
_FILES = "file://{home}/rows?budget=1MiB"
_LOGGED = "memory?log={home}/rows"
# A node of a Cluster that was started again takes no writes for two seconds.
_NODES = "redis://{node0},{node1},{node2}?partitions=8&deadline=15"
_WATCHED = "redis+sentinel://{sentinel0},{sentinel1},{sentinel2}?service=service&partitions=4&deadline=15"
_CAREFUL = f"{_KEPT_IN}min-replicas-to-write 1"
_SHARDS = "servers:{shard0},{shard1}"
_SERVERS = f"{_SHARDS}{_KEPT_IN}memory?log={{home}}/shard{{number}}"
_FILE_SERVERS = f"{_SHARDS}{_KEPT_IN}file://{{home}}/shard{{number}}?budget=1MiB&flush=0.02"
_FORGETTING_SERVERS = f"{_SHARDS}{_KEPT_IN}memory"

KINDS: dict[str, tuple[str, ...]] = {
    "memory": ("memory",),
    "redis": (_REDIS,),
    "files": (_FILES,),
    "shards": (f"token:{','.join(_TWO_REDIS)}", f"encoding:{','.join(_TWO_REDIS)}"),
    "flushed": (_FLUSHED, f"{_FILES}&flush=0.02"),
    "every": ("memory", "memory", _FILES, "token:memory,memory"),
    "logged": (_LOGGED, f"{_LOGGED}&log_bytes=64KiB"),
    "every-redis": (_FLUSHED, _REDIS, f"token:{','.join(_TWO_REDIS)}"),
    "cluster": (_NODES, f"{_NODES}&flush=0.02"),
    "sentinel": (_WATCHED, f"{_WATCHED}&flush=0.02", f"{_WATCHED}{_CAREFUL}", f"{_WATCHED}&flush=0.02{_CAREFUL}"),
    "servers": (_SERVERS, _SERVERS, _FILE_SERVERS, _FORGETTING_SERVERS),
    "async": ("memory", _LOGGED, _FLUSHED, _FILES, _SERVERS),
}
"""Kinds of schedules, and where their rows may be. In "every" and "every-redis" rows follow every step (`lazy=False`);
a job of "async" is asynchronous."""

_SERVER = re.compile(r"\{(redis2?|node\d|sentinel\d|shard\d)\}")


def store_of(kind: str, seed: int) -> str:
    """The template of a schedule; a chance of its own, so that the faults of older kinds stay what they were."""
    return random.Random(f"{kind}/{seed}/store").choice(KINDS[kind])


def servers_of(template: str) -> tuple[str, ...]:
    """Names of the servers that the store's URL names, in order."""
    return tuple(dict.fromkeys(_SERVER.findall(template)))


def redis_of(template: str) -> tuple[str, ...]:
    """Names of the Redis servers that rows are in, whether the URL names them or Sentinels do."""
    servers = servers_of(template)
    if "sentinel0" in servers:
        return PRIMARY_AND_REPLICA
    return tuple(server for server in servers if server in (*REDIS_SERVERS, *CLUSTER))


def processes_of(template: str) -> tuple[str, ...]:
    """Names of servers that are processes of the product, and which workers reach without the master."""
    return tuple(server for server in servers_of(template) if server.startswith("shard"))


def on_store_servers(template: str) -> bool:
    """Whether rows are at store servers (`--stores`)."""
    return template.startswith(_SHARDS)


def shard_store(template: str, number: int, home: str) -> str:
    return template.partition(_KEPT_IN)[2].format(home=home, number=number)


def server_line(template: str) -> str:
    return template.partition(_KEPT_IN)[2] if redis_of(template) else ""


def filled_in(template: str, servers: Mapping[str, str], home: str) -> str:
    """The URL: `servers` gives host:port by name, `home` is the schedule's folder."""
    return template.partition(_KEPT_IN)[0].format(**servers, home=home)


def lasts(template: str) -> bool:
    """Whether the store keeps the record of its versions, and loses none of them whatever dies.

    A replica that becomes the primary may lack what the primary had confirmed.
    """
    if on_store_servers(template):
        return not forgets(template)
    named = servers_of(template)
    return template.startswith(("file:", _LOGGED)) or (bool(named) and set(named) <= {*REDIS_SERVERS, *CLUSTER})


def in_files(template: str) -> bool:
    """Whether the master writes rows, or their changes, to files of its own."""
    return not on_store_servers(template) and ("file:" in template or template.startswith(_LOGGED))


def patient(template: str) -> str:
    """The same store, whose servers may take a minute to answer."""
    return re.sub(r"deadline=\d+", "deadline=60", template)


def forgets(template: str) -> bool:
    """Whether rows lie in a server that loses them when it dies."""
    return "store" in servers_of(template) or template == _FORGETTING_SERVERS
