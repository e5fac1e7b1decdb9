"""The log that is none: changes are counted, and nothing is kept of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from elastable.embedding_store.errors import FutureVersion, StaleVersion
from elastable.embedding_store.log.contract import Buffer, Log, LogEntry

__all__ = ["NoLog"]


class NoLog(Log):
    """Counts entries. A store with it is as safe as its last flush."""

    def __init__(self, last: int = 0) -> None:
        """`last`: the number of the last entry so far."""
        self._last = last

    @property
    def first(self) -> int:
        return self._last + 1

    @property
    def last(self) -> int:
        return self._last

    @property
    def bytes(self) -> int:
        return 0

    @property
    def keeps_entries(self) -> bool:
        return False

    def append(self, sequence: int, version: int, parts: Sequence[Buffer]) -> None:
        if sequence != self._last + 1:
            error = StaleVersion if sequence <= self._last else FutureVersion
            raise error(f"entry {sequence} cannot be appended, the next one is {self._last + 1}")
        self._last = sequence

    def entries(self, after: int = 0) -> Iterator[LogEntry]:
        return iter(())

    def sync(self) -> None:
        """There is nothing to make durable."""

    def trim(self, through: int) -> None:
        """There is nothing to let go of."""

    def truncate(self, after: int) -> None:
        self._last = after

    def close(self) -> None:
        """There is nothing to free."""
