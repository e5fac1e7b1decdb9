"""What every write-ahead log promises, and the log that keeps nothing."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elastable.embedding_store.closing import Closing
from elastable.embedding_store.errors import BadInput, FutureVersion, StaleVersion

Buffer = bytes | bytearray | memoryview
"""Bytes to append; C-contiguous."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One entry, as it was appended.

    Attributes:
        sequence: Its number, from 1 on and without gaps.
        version: The store's version once the entry is applied.
        payload: What was appended; valid until the next entry is read.
    """

    sequence: int
    version: int
    payload: memoryview


class Log(Closing):
    """The changes of one store, in order. One process appends; `append` and `trim` may run on different threads.

    Attributes:
        keeps_entries: Whether there is anything to replay after a crash.
    """

    keeps_entries = True

    @property
    @abstractmethod
    def first(self) -> int:
        """The sequence number of the oldest entry that is kept; `last` + 1 when there is none."""

    @property
    @abstractmethod
    def last(self) -> int:
        """The sequence number of the newest entry, also when it has been trimmed; 0: nothing was ever appended."""

    @property
    def reached(self) -> int:
        """The greatest number that was given, as far as the log knows: above `last`, newer entries are lost."""
        return self.last

    @abstractmethod
    def check_at(self, sequence: int) -> int | None:
        """The checksum of an entry's header, which depends on every entry before it; None: it is not in the log."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Bytes that the entries take."""

    @abstractmethod
    def append(self, sequence: int, version: int, parts: Sequence[Buffer]) -> None:
        """Appends one entry; on return it survives the death of this process.

        Whether it also survives the loss of power is the log's fsync policy.

        Args:
            sequence: `last` + 1.
            version: The store's version once the entry is applied.
            parts: The payload, in pieces that are joined on the way.

        Raises:
            StaleVersion, FutureVersion: another sequence number is next.
            StoreFailed: the entry could not be written; the log is as it was.
            Unavailable, DeadlineExceeded: there was no answer. The same entry may be appended again, and is then there
                once; another one takes its place.
            StoreBroken: it could not be written, and nothing can be appended any more.
            TakenOver: another process owns the log now.
        """

    @abstractmethod
    def entries(self, after: int = 0) -> Iterator[LogEntry]:
        """Every entry after a sequence number, oldest first.

        Raises:
            StoreBroken: an entry is corrupt; the message names it and its place.
            BadInput: entries after `after` were trimmed.
        """

    @abstractmethod
    def sync(self) -> None:
        """Returns once everything appended is as durable as this log can make it, whatever its policy.

        Raises:
            StoreBroken: it cannot be made so, and nothing can be appended any more.
            StoreFailed, Unavailable, DeadlineExceeded: nothing can be said.
        """

    @abstractmethod
    def trim(self, through: int) -> None:
        """Lets go of entries up to the sequence number `through`; the log may keep some of them a while longer."""

    @abstractmethod
    def truncate(self, after: int) -> None:
        """Takes the entries after a sequence number back. Raises `BadInput` where entries after it were trimmed."""

    def refresh(self) -> None:
        """Finds out what another process has appended or trimmed, and takes back an entry whose `append` failed."""


def require_next(sequence: int, last: int, place: object) -> None:
    """Raises `StaleVersion` or `FutureVersion` unless `sequence` comes after `last`; `place`: the log, for messages."""
    if sequence != last + 1:
        error = StaleVersion if sequence <= last else FutureVersion
        raise error(f"{place}: entry {sequence} cannot be appended, the next one is {last + 1}")


def require_kept(after: int, first: int, place: object) -> None:
    """Raises `BadInput` where a log that begins with entry `first` cannot be truncated after another one."""
    if not (after >= first or (after == 0 and first == 1)):
        raise BadInput(f"{place} begins with entry {first}: it cannot be truncated after entry {after}")


# The log that is none: changes are counted, and nothing is kept of them


class NoLog(Log):
    """Counts entries. A store with it is as safe as its last flush."""

    keeps_entries = False

    def __init__(self, last: int = 0) -> None:
        """`last`: the number of the last entry so far."""
        self._last = last

    @property
    def first(self) -> int:
        return self._last + 1

    @property
    def last(self) -> int:
        return self._last

    def check_at(self, sequence: int) -> int | None:
        return None

    @property
    def bytes(self) -> int:
        return 0

    def append(self, sequence: int, version: int, parts: Sequence[Buffer]) -> None:
        require_next(sequence, self._last, "a log that keeps nothing")
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
