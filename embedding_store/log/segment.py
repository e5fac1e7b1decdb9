"""Files of a log's folder: segments of entries without gaps, and bases, which make the log before them unnecessary."""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

from elastable.embedding_store.errors import StoreBroken, StoreFailed
from elastable.embedding_store.log.contract import Buffer, LogEntry
from elastable.embedding_store.log.framing import (
    HEADER_BYTES,
    MAGIC,
    Header,
    frame_header,
    is_intact,
    next_intact,
    other_format,
    parse_header,
)
from elastable.embedding_store.support.checked_files import (
    OpenFile,
    open_regular,
    reason_of,
    store_failures,
    sync_folder,
)

_SUFFIX = ".log"
_MOST_PIECES = 512  # that one system call writes; Linux takes 1,024


def segment_name(first: int) -> str:
    """The name of the file whose first entry has the sequence number `first`; names sort as the numbers do."""
    return f"{first:020d}{_SUFFIX}"


def segment_first(name: str) -> int | None:
    """The sequence number in a file's name; None: it is not the name of a segment."""
    digits = name.removesuffix(_SUFFIX)
    return int(digits) if digits.isascii() and digits.isdecimal() and name == segment_name(int(digits)) else None


@dataclass(slots=True)
class Segment:
    """A file of a log.

    Attributes:
        path: Where it is.
        first, last: Sequence numbers of its first and its last entry.
        bytes: Its length.
        previous: `Header.previous` of its first entry.
        check: `Header.check` of its last entry.
    """

    path: Path
    first: int
    last: int
    bytes: int
    previous: int
    check: int

    def entries(self) -> Iterator[LogEntry]:
        """Its entries, oldest first. Raises `StoreBroken` where one cannot be read."""
        with SegmentReader(self.path) as reader:
            yield from reader.entries(self.bytes)
            if reader.offset < self.bytes:
                reader.refuse_corruption()
                lost = self.first if reader.last is None else reader.last.sequence + 1
                raise StoreBroken(
                    f"{self.path} is corrupt at byte {reader.offset:,}: entries {lost} to {self.last} cannot be read"
                )


class SegmentReader(OpenFile):
    """Reads a segment entry by entry, each of which must follow the one before.

    Attributes:
        offset: Bytes of the file that intact entries take so far.
        first, last: Headers of the first and of the last entry that was read; None: there was none.
    """

    def __init__(self, path: Path, first: int | None = None) -> None:
        """Opens the file.

        Args:
            path: Of the file.
            first: The sequence number of its first entry; None: its name says it.

        Raises:
            StoreFailed: the file cannot be opened.
        """
        self.path = path
        self._first = segment_first(path.name) if first is None else first
        self.offset = 0
        self.first: Header | None = None
        self.last: Header | None = None
        with store_failures(path, "cannot be read"):
            self.fd = open_regular(path)

    def headers(self) -> Iterator[Header]:
        """Headers of the entries, without their payloads; ends where no whole entry begins.

        Raises:
            StoreBroken: an entry does not follow the one before.
        """
        size = self.size
        while (header := self._header(size)) is not None:
            self._advance(header)
            yield header

    def entries(self, end: int | None = None) -> Iterator[LogEntry]:
        """The entries up to byte `end` (None: the file's length); ends where none is intact.

        Raises:
            StoreBroken: an entry does not follow the one before.
        """
        size = self.size if end is None else end
        while (header := self._header(size)) is not None:
            content = self._read(self.offset, header.entry_bytes)
            if not is_intact(content, 0, header):
                return
            self._advance(header)
            yield LogEntry(header.sequence, header.version, content[HEADER_BYTES:])

    @property
    def size(self) -> int:
        """The file's length in bytes, now."""
        return os.fstat(self.fd).st_size

    @property
    def replaced(self) -> bool:
        """Whether another file has its path now; one that was removed is not replaced."""
        with store_failures(self.path, "cannot be read"), suppress(FileNotFoundError):
            return not os.path.samestat(os.fstat(self.fd), self.path.lstat())
        return False

    def refuse_corruption(self) -> None:
        """Does nothing where only a torn entry, or nothing, is behind `offset`.

        Raises:
            StoreBroken: an intact entry comes later, so what is at `offset` was whole once; or it is of another format.
        """
        rest = self._read(self.offset, self.size - self.offset)
        if (other := other_format(rest)) is not None:
            raise StoreBroken(
                f"{self.path}: the entry at byte {self.offset:,} is of format {other}; this version reads {MAGIC!r}"
            )
        found = next_intact(rest, 1)
        if found is not None:
            place, header = found
            raise StoreBroken(
                f"{self.path} is corrupt at byte {self.offset:,}: the next intact entry, {header.sequence}, begins at "
                f"byte {self.offset + place:,}; restore a checkpoint of version {header.version} or later"
            )

    def _advance(self, header: Header) -> None:
        if self.last is None:
            if header.sequence != self._first:
                raise StoreBroken(f"{self.path} is corrupt: its first entry is {header.sequence}")
            self.first = header
        elif header.sequence != self.last.sequence + 1 or header.previous != self.last.check:
            raise StoreBroken(f"{self.path} is corrupt: entry {header.sequence} comes after {self.last.sequence}")
        self.last = header
        self.offset += header.entry_bytes

    def _header(self, size: int) -> Header | None:
        header = parse_header(self._read(self.offset, HEADER_BYTES))
        return None if header is None or self.offset + header.entry_bytes > size else header

    def _read(self, offset: int, length: int) -> memoryview:
        try:
            content, filled = memoryview(bytearray(length)), 0
        except MemoryError as error:  # a file may be longer than what was ever written to it
            raise StoreFailed(
                f"{self.path}: {length:,} bytes from byte {offset:,} on do not fit into memory"
            ) from error
        try:
            while filled < length and (count := os.preadv(self.fd, [content[filled:]], offset + filled)):
                filled += count
        except OSError as error:
            raise StoreBroken(f"{self.path} cannot be read at byte {offset:,}: {error.strerror}") from error
        return content[:filled]


def write_all(fd: int, parts: Sequence[Buffer], offset: int) -> int:
    """Writes `parts` one after the other at `offset`; returns how many bytes. Raises `OSError`."""
    pieces = [memoryview(part).cast("B") for part in parts]
    pieces = [piece for piece in pieces if len(piece)]
    start = offset
    while pieces:
        written = os.pwritev(fd, pieces[:_MOST_PIECES], offset)
        offset += written
        while pieces and written >= len(pieces[0]):
            written -= len(pieces.pop(0))
        if written:
            pieces[0] = pieces[0][written:]
    return offset - start


# The segments of a log's folder, checked as it is opened


_log = logging.getLogger(__name__)


def open_segments(folder: Path) -> list[Segment]:
    """The segments of a folder, oldest first. What a process left that died while it appended is cut off.

    Raises:
        StoreBroken: a segment is missing, or corrupt before its end.
    """
    segments = []
    for path, segment, torn in _opened(folder):
        if torn:
            _cut(path, segment, torn)
        if segment is None:
            path.unlink()
        else:
            segments.append(segment)
    _require_whole(folder, segments)
    return segments


def check_segments(folder: Path) -> tuple[list[Segment], int]:
    """The segments of a folder, oldest first, and the bytes of a torn entry at its end; changes nothing.

    Raises:
        StoreBroken: as `open_segments`.
        StoreFailed: the folder cannot be read.
    """
    with store_failures(folder, "cannot be read"):
        found = _opened(folder)
    segments = [segment for _, segment, _ in found if segment is not None]
    _require_whole(folder, segments)
    return segments, sum(torn for _, _, torn in found)


def _opened(folder: Path) -> list[tuple[Path, Segment | None, int]]:
    """Of each segment, oldest first: its path, itself without a torn entry, and that entry's bytes."""
    names = segment_names(folder)
    return [(folder / name, *_open_segment(folder / name, newest=name == names[-1])) for name in names]


def segment_names(folder: Path) -> list[str]:
    """Names of the segments of a folder, oldest first. Raises `OSError`."""
    return sorted(entry.name for entry in folder.iterdir() if segment_first(entry.name) is not None)


def _require_whole(folder: Path, segments: Sequence[Segment]) -> None:
    for before, segment in pairwise(segments):
        if segment.previous != before.check or segment.first != before.last + 1:
            raise StoreBroken(
                f"{folder} is corrupt: entries are missing between {before.last}, where one segment ends, "
                f"and {segment.first}, where the next one begins"
            )


def _open_segment(path: Path, newest: bool) -> tuple[Segment | None, int]:
    """The segment without a torn entry at its end, and that entry's bytes; None: it holds no whole entry."""
    with SegmentReader(path) as reader:
        # Only the newest segment can be torn: the others were complete before the next one was begun.
        for _ in reader.entries() if newest else reader.headers():
            pass
        torn = reader.size - reader.offset
        if torn:
            reader.refuse_corruption()
        first, last = reader.first, reader.last
        if torn and not newest:
            behind = "the beginning" if last is None else f"entry {last.sequence}"
            raise StoreBroken(f"{path} is corrupt at byte {reader.offset:,}, behind {behind}; later segments follow")
        if first is None or last is None:
            return None, torn
        return Segment(path, first.sequence, last.sequence, reader.offset, first.previous, last.check), torn


def _cut(path: Path, segment: Segment | None, torn: int) -> None:
    behind = "the beginning" if segment is None else f"entry {segment.last}"
    _log.warning("%s: dropped %d bytes of an entry that was not written whole, behind %s", path, torn, behind)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.ftruncate(fd, 0 if segment is None else segment.bytes)
        os.fdatasync(fd)
    finally:
        os.close(fd)


# A whole store in one file: the changes that make it from nothing, so that the log before it can be trimmed


_BASE, _DRAFT = ".base", ".base.new"


@dataclass(frozen=True, slots=True)
class BaseFile:
    """A base.

    Attributes:
        sequence: The last log entry that it includes.
    """

    path: Path
    sequence: int
    bytes: int

    def payloads(self) -> Iterator[tuple[int, memoryview]]:
        """The store's version and a payload, for each change in turn; a payload is valid until the next one.

        Raises:
            StoreBroken: the file is corrupt.
        """
        whole = False
        with SegmentReader(self.path, first=1) as reader:
            for entry in reader.entries():
                whole = not len(entry.payload)  # nothing but the end is empty
                if not whole:
                    yield entry.version, entry.payload
            if not whole or reader.offset < reader.size:
                raise StoreBroken(
                    f"{self.path} is corrupt at byte {reader.offset:,} of {reader.size:,}: restore a checkpoint into a "
                    "new folder"
                )


def find_base(folder: Path) -> BaseFile | None:
    """The newest base of a folder; None: there is none.

    Raises:
        StoreFailed: the folder cannot be read.
    """
    with store_failures(folder, "cannot be read"):
        found = _bases(folder)
        return BaseFile(found[-1], int(found[-1].stem), found[-1].stat().st_size) if found else None


def newest_base(folder: Path) -> BaseFile | None:
    """As `find_base`; older bases, and one that was not written to its end, are removed."""
    with store_failures(folder, "cannot be used"):
        for unused in (*folder.glob(f"*{_DRAFT}"), *_bases(folder)[:-1]):
            unused.unlink()
    return find_base(folder)


def base_paths(folder: Path) -> list[Path]:
    """Every base of a folder, oldest first, and what was not written to its end. Raises `OSError`."""
    return [*_bases(folder), *folder.glob(f"*{_DRAFT}")]


def _bases(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"*{_BASE}") if path.stem.isdecimal())


def write_base(folder: Path, sequence: int, version: int, payloads: Iterable[Sequence[Buffer]]) -> BaseFile:
    """Writes a base; on return it is on the disk, and older ones are removed.

    Args:
        sequence: The last log entry that it includes.
        payloads: The changes that make the store, in order; none is empty.

    Raises:
        StoreFailed: it cannot be written; the folder is as it was.
    """
    path = folder / f"{sequence:020d}{_BASE}"
    draft = path.with_suffix(_DRAFT)
    try:
        offset = previous = 0
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            for number, parts in enumerate(chain(payloads, [[]]), 1):
                # Nothing but the end is empty.
                header, previous = frame_header(number, version, parts, previous)
                offset += write_all(fd, [header, *parts], offset)
            os.fsync(fd)
        finally:
            os.close(fd)
        draft.replace(path)
        sync_folder(folder)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise StoreFailed(f"{path} cannot be written: {reason_of(error)}") from error
    newest_base(folder)
    return BaseFile(path, sequence, offset)
