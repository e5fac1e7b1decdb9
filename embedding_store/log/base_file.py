"""A whole store in one file: the changes that make it from nothing, so that the log before it can be trimmed."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from elastable.embedding_store.errors import StoreBroken, StoreFailed
from elastable.embedding_store.log.contract import Buffer
from elastable.embedding_store.log.framing import frame_header
from elastable.embedding_store.log.segment import SegmentReader, write_all
from elastable.embedding_store.support.checked_files import reason_of, store_failures, sync_folder

_SUFFIX, _DRAFT = ".base", ".base.new"


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
    return sorted(path for path in folder.glob(f"*{_SUFFIX}") if path.stem.isdecimal())


def write_base(folder: Path, sequence: int, version: int, payloads: Iterable[Sequence[Buffer]]) -> BaseFile:
    """Writes a base; on return it is on the disk, and older ones are removed.

    Args:
        sequence: The last log entry that it includes.
        payloads: The changes that make the store, in order; none is empty.

    Raises:
        StoreFailed: it cannot be written; the folder is as it was.
    """
    path = folder / f"{sequence:020d}{_SUFFIX}"
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
