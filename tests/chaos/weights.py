"""How often which fault strikes, and at which gates: by where rows are."""

from __future__ import annotations

from tests.chaos.stores import CLUSTER, PRIMARY_AND_REPLICA, REDIS_SERVERS, SERVICE, in_files, processes_of, redis_of

__all__ = ["faults_of", "gates_of"]

# Action and target, and how often of all.
_Weighted = tuple[tuple[str, int], ...]
_ALWAYS: _Weighted = (
    ("kill worker", 6), ("kill master", 5),
    ("stop worker", 4), ("stop master", 2), ("cut worker-master", 4),
    ("delay worker-master", 2), ("silence worker-master", 1), ("fill master", 2),
)  # fmt: skip
_IN_MASTER: _Weighted = (("supersede master", 2),)
_IN_FILES: _Weighted = (("kill master", 3), ("fill master", 4))
_RESUMED: _Weighted = (("kill master", 8),)
_OF_REDIS: _Weighted = (
    ("supersede master", 4),
    ("kill redis", 4), ("stop redis", 2), ("fill redis", 2), ("cut master-redis", 4),
    ("delay master-redis", 1), ("silence master-redis", 1),
)  # fmt: skip
_OF_STORE: _Weighted = (
    ("kill store", 2), ("stop store", 2), ("cut master-store", 4), ("cut worker-store", 2),
    ("delay master-store", 1), ("delay worker-store", 1),
)  # fmt: skip
_OF_MANY: _Weighted = (("kill master", 8), ("supersede master", 8))
_FAILOVERS: _Weighted = ((f"fail {SERVICE}", 8), (f"failover {SERVICE}", 8))


def faults_of(store: str, lazy: bool) -> _Weighted:
    """Action and target of every fault that schedules of such a store have, and how often of all."""
    return (*_ALWAYS, *_of_store(store), *(() if lazy else _RESUMED))


def _of_store(store: str) -> _Weighted:
    servers = (*redis_of(store), *processes_of(store))
    if not servers:
        return _IN_FILES if in_files(store) else _IN_MASTER
    if servers[0] not in (*REDIS_SERVERS, "store"):
        return _of_many(servers)
    faults = _OF_REDIS if servers[0] in REDIS_SERVERS else _OF_STORE
    if "redis2" in servers:
        faults += _renamed(faults, "redis", "redis2")
        faults += (("kill master", 5),)  # between the shards
    return faults


def _of_many(servers: tuple[str, ...]) -> _Weighted:
    name, of_one = ("redis", _OF_REDIS) if servers[0] in (*CLUSTER, *PRIMARY_AND_REPLICA) else ("store", _OF_STORE)
    faults = tuple(fault for server in servers for fault in _renamed(of_one, name, server))
    return faults + _OF_MANY + (_FAILOVERS if servers == PRIMARY_AND_REPLICA else ())


def _renamed(faults: _Weighted, name: str, server: str) -> _Weighted:
    return tuple((words.replace(name, server), often) for words, often in faults if name in words)


def gates_of(store: str) -> tuple[str, ...]:
    """Places that only a process with such a store comes to."""
    servers = (*redis_of(store), *processes_of(store))
    if "flush=" in store:
        return ("logged",) * 4 + ("writing", "written", "stated") * 4
    if "redis2" in servers:
        return ("exec",) * 3 + ("exec2",) * 3 + ("half",) * 6
    if servers == CLUSTER:
        return ("exec", "exec2", "exec3", "logged") * 2
    if servers == PRIMARY_AND_REPLICA:
        return ("exec", "logged") * 3
    of_first = {"redis": ("exec",) * 6, "store": ("stored",) * 4, "shard0": ("stored",) * 8}
    return of_first.get(servers[0], ()) if servers else ()
