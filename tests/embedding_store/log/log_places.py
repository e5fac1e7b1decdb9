"""Where logs of every kind are kept in tests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from elastable.embedding_store.log.contract import Log
from elastable.embedding_store.log.file_log import FileLog
from elastable.embedding_store.tiers.redis.streams.redis_log import RedisLog

__all__ = ["KINDS", "Entry", "FilePlace", "LogPlace", "RedisStream", "open_log", "read"]

#: Names of fixtures that give an empty server; "files": none is needed.
KINDS = ("files", "redis_url", "valkey_url", "redis_cluster_url")

Entry = tuple[int, int, bytes]
"""Sequence number, version, payload."""


class LogPlace(ABC):
    """A place that can hold many logs, one after the other."""

    @abstractmethod
    def empty(self) -> str:
        """Another log's address, for `open_log`."""


@dataclass
class FilePlace(LogPlace):
    """Folders."""

    parent: Path

    def __post_init__(self) -> None:
        self._numbers = count()

    def empty(self) -> str:
        return str(self.parent / str(next(self._numbers)))


@dataclass
class RedisStream(LogPlace):
    """Namespaces of a server."""

    url: str

    def __post_init__(self) -> None:
        self._numbers = count()

    def empty(self) -> str:
        return f"{self.url}?namespace=log{next(self._numbers)}"


def open_log(address: str) -> Log:
    """The log there; in files each entry has a segment of its own, so that `trim` is exact."""
    return RedisLog(address) if "://" in address else FileLog(address, segment_bytes=1)


def read(log: Log, after: int = 0) -> list[Entry]:
    """Every entry after that one."""
    return [(entry.sequence, entry.version, bytes(entry.payload)) for entry in log.entries(after)]
