"""Where logs of every kind are kept in tests."""

from elastable.embedding_store.log.contract import Log
from elastable.embedding_store.log.file_log import FileLog
from elastable.embedding_store.tiers.redis.redis_log import RedisLog

#: Names of fixtures that give an empty server; "files": none is needed.
KINDS = ("files", "redis_url", "valkey_url", "redis_cluster_url")

Entry = tuple[int, int, bytes]
"""Sequence number, version, payload."""


def open_log(address: str) -> Log:
    """The log there; in files each entry has a segment of its own, so that `trim` is exact."""
    return RedisLog(address) if "://" in address else FileLog(address, segment_bytes=1)


def read(log: Log, after: int = 0) -> list[Entry]:
    return [(entry.sequence, entry.version, bytes(entry.payload)) for entry in log.entries(after)]
