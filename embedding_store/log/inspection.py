"""Reads the folder of a log without opening it as a store does: nothing is locked, changed or replayed."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from elastable.embedding_store.closing import Closing
from elastable.embedding_store.errors import BadInput, StoreBroken
from elastable.embedding_store.log.changes import CommitImages, decode_change
from elastable.embedding_store.log.contract import Log, LogEntry
from elastable.embedding_store.log.segment import (
    SegmentReader,
    check_segments,
    find_base,
    segment_first,
    segment_name,
    segment_names,
)
from elastable.embedding_store.support.checked_files import store_failures


@dataclass(frozen=True, slots=True)
class LogReport:
    """The contents of a log's folder.

    Attributes:
        base: The name of the base file; None: there is none.
        base_version: The version of the store in it; 0 without one.
        base_bytes: Its length.
        first, last: Sequence numbers of the oldest and the newest entry; last is 0 when there is none.
        version: The store's version after the newest entry.
        bytes: What the entries take.
        torn_bytes: Of an entry at the end that was not written whole.
        changes: Kind of change -> entries of that kind.
        rows: Rows that the commits among them have written.
        flushed: Up to this entry the rows of a store with a tier are there, so a base is not needed.
    """

    base: str | None
    base_version: int
    base_bytes: int
    first: int
    last: int
    version: int
    bytes: int
    torn_bytes: int
    changes: Mapping[str, int] = field(default_factory=dict)
    rows: int = 0
    flushed: int = 0


def counted(entries: Iterable[LogEntry], version: int) -> tuple[int, dict[str, int], int]:
    """The store's version after some entries, kind of change -> entries of that kind, and rows that commits wrote.

    Args:
        entries: Each is read to its end.
        version: Of the store before them.

    Raises:
        StoreBroken: an entry is no change of a store.
    """
    kinds, rows = Counter[str](), 0
    for entry in entries:
        change = decode_change(entry.payload)
        version = entry.version
        kinds[type(change).__name__] += 1
        if isinstance(change, CommitImages):
            rows += sum(len(images.ids) for images in change.tables)
    return version, dict(kinds), rows


def entry_of_version(log: Log, after: int, version: int) -> tuple[int, int]:
    """Where a log is at a version.

    Args:
        log: Its entries after `after` are read.
        after: The store's version there is at most `version`.
        version: The version to find.

    Returns:
        The last entry of that version or an earlier one, and how many rows the commits after it have written.
    """
    keep, rows = after, 0
    for entry in log.entries(after):
        if entry.version <= version:
            keep, rows = entry.sequence, 0
        else:
            rows += counted([entry], version)[2]
    return keep, rows


def inspect_log(folder: str | Path) -> LogReport:
    """Reads and checks every byte of a log and its base.

    A store that has the folder open may append meanwhile; what it appends during the call may be missing here.

    Raises:
        BadInput: the folder holds no log.
        StoreBroken: the log or its base is corrupt, or they do not fit.
        StoreFailed: the folder cannot be read.
    """
    folder = Path(folder)
    base = find_base(folder)
    version = 0
    if base is not None:
        for version, payload in base.payloads():  # noqa: B007 - the last one's version counts
            decode_change(payload)
    base_version, begin = version, 0 if base is None else base.sequence
    segments, torn = check_segments(folder)
    if base is None and not segments:
        raise BadInput(f"{folder} holds no log")
    if segments and (segments[0].first > begin + 1 or segments[-1].last < begin):
        raise StoreBroken(
            f"{folder} is incomplete: its base includes entries up to {begin}, and its log holds "
            f"{segments[0].first} to {segments[-1].last}"
        )
    version, changes, rows = counted(chain.from_iterable(segment.entries() for segment in segments), version)
    return LogReport(
        base=None if base is None else base.path.name,
        base_version=base_version,
        base_bytes=0 if base is None else base.bytes,
        first=segments[0].first if segments else begin + 1,
        last=segments[-1].last if segments else begin,
        version=version,
        bytes=sum(segment.bytes for segment in segments),
        torn_bytes=torn,
        changes=changes,
        rows=rows,
    )


class LogTail(Closing):
    """Reads a log to which another process appends, from an entry on.

    Attributes:
        last: The entry that was read last.

    Raises:
        BadInput: the folder holds no log.
        StoreFailed: it cannot be read.
    """

    def __init__(self, folder: Path, after: int) -> None:
        self.last = after
        self._folder = folder
        self._reader: SegmentReader | None = None
        if not after and not self._firsts(folder):
            raise BadInput(f"{folder} holds no log")

    def entries(self) -> Iterator[LogEntry]:
        """The entries behind `last` that are there by now; one that is being written is not.

        Raises:
            BadInput: some of them were trimmed.
            StoreBroken: they are corrupt, or those that were read were taken back, or are of another log.
            StoreFailed: the folder cannot be read.
        """
        while True:
            firsts = self._firsts(self._folder)  # before the entries: none of these segments begins behind them then
            if self._reader is None:
                self._reader = self._opened(firsts, self.last)
            if (reader := self._reader) is None:
                return
            if reader.replaced or max(firsts, default=0) < (segment_first(reader.path.name) or 0):
                raise StoreBroken(f"{self._folder} holds another log than the one that entry {self.last} was read of")
            for entry in reader.entries():
                if entry.sequence > self.last:
                    self.last = entry.sequence
                    yield entry
            if reader.size > reader.offset:
                reader.refuse_corruption()
            if reader.size < reader.offset:
                raise StoreBroken(f"{self._folder} ends before entry {self.last}, which was there: it was taken back")
            if all(first <= self.last for first in firsts) or reader.path.name == segment_name(self.last + 1):
                return
            self.close()

    def newest(self) -> int | None:
        """The store's version after the newest entry; None: there is none. Raises as `entries`."""
        firsts, version = self._firsts(self._folder), None
        if firsts:
            with SegmentReader(self._folder / segment_name(firsts[-1])) as reader:
                for header in reader.headers():
                    version = header.version
        return version

    def close(self) -> None:
        """Closes the segment that is read."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    @staticmethod
    def _firsts(folder: Path) -> list[int]:
        with store_failures(folder, "cannot be read"):
            return [first for name in segment_names(folder) if (first := segment_first(name)) is not None]

    def _opened(self, firsts: list[int], after: int) -> SegmentReader | None:
        """The segment that the entry behind `after` is in, or will be in; None: there are no segments yet."""
        before = [first for first in firsts if first <= after + 1]
        if firsts and not before:
            raise BadInput(f"{self._folder} begins with entry {firsts[0]}: those after {after} were trimmed")
        return SegmentReader(self._folder / segment_name(before[-1])) if before else None
