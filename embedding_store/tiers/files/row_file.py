"""One part of a table's rows in a file of records: allocated before written, checked when read."""

from __future__ import annotations

import json
import mmap
import os
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.tiers.files.record_kernels import (
    copy_records,
    load_records,
    new_chunks,
    record_words,
    store_records,
)

__all__ = ["RowFile"]

_HEADER_BYTES = 4096
_RUN_BYTES = 1 << 18  # that one system call moves; written so, the system's cache has large pages and is read faster
_CHUNK_BYTES = 1 << 16  # blocks of a file are taken by so much
_MAGIC = "elastable-rows-1"


class RowFile:
    """Records of one size at positions 0, 1, 2, ...; the file is sparse.

    A header names the table and the part, so that a file in another's place is
    refused. Reading and writing may run from many threads, of different
    positions. A full disk is met by `allocate`, before any row is written.
    """

    def __init__(self, path: Path, table: str, part: str, row_bytes: int, fresh: bool) -> None:
        """Opens the file.

        Args:
            path: Of the file.
            table: Its table.
            part: What of the rows it holds, "weights", "slots", ...
            row_bytes: Of a row, at least 1.
            fresh: Whether to begin with an empty file, whatever is there.

        Raises:
            StoreFailed: it cannot be made, or is not this table's file.
        """
        self.path = path
        self._row_bytes = row_bytes
        self._record_bytes = 8 * record_words(row_bytes)
        self._chunk = max(1, _CHUNK_BYTES // self._record_bytes)
        self._allocated = np.zeros(1024, np.bool_)
        self._file: npt.NDArray[np.uint64] | None = None
        header = _header(table, part, row_bytes)
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_TRUNC if fresh else 0), 0o600)
        except OSError as error:
            raise _failed(path, "cannot be opened", error) from error
        try:
            if fresh:
                _write_header(self._fd, path, header)
            else:
                _require_header(self._fd, path, header)
        except BaseException:
            self.close()
            raise

    def allocate(self, positions: Int64) -> None:
        """Takes the blocks that records at `positions` int64 `[n]` need.

        Raises:
            StoreFailed: the disk, a quota or a limit has no room for them; no record has changed.
        """
        fresh = np.empty(len(positions), np.int64)
        count = new_chunks(positions, self._chunk, self._allocated, fresh)
        if not count:
            return
        chunks = np.unique(fresh[:count])
        chunk_bytes = self._chunk * self._record_bytes
        for run in np.split(chunks, np.flatnonzero(np.diff(chunks) != 1) + 1):
            begin, length = _HEADER_BYTES + int(run[0]) * chunk_bytes, len(run) * chunk_bytes
            try:
                os.posix_fallocate(self._fd, begin, length)
            except OSError as error:
                raise self._no_room(length, error) from error
        self._take(chunks)

    def adopt(self, positions: Int64) -> None:
        """Is told that records at `positions` int64 `[n]` were written before.

        Raises:
            StoreFailed: the file is too short to hold them.
        """
        if not len(positions):
            return
        needed = _HEADER_BYTES + (int(positions.max()) + 1) * self._record_bytes
        held = os.fstat(self._fd).st_size
        if held < needed:
            raise StoreFailed(f"{self.path} is cut short: {held} bytes where its rows need {needed}")
        self._take(np.unique(positions // self._chunk))

    def load(self, positions: Int64, rows: npt.NDArray[np.generic], targets: Int64) -> None:
        """Reads record `positions[i]` into `rows[targets[i]]`; rows are C-contiguous, of `row_bytes` bytes each.

        Raises:
            StoreFailed: a record cannot be read, or is not what was written.
        """
        begin, size = _HEADER_BYTES, self._row_bytes
        file = self._mapped(positions)
        if file is not None:
            index, wrong = copy_records(file, begin // 8, positions, _as_bytes(rows), targets, size), 2
        else:
            index, wrong = load_records(self._fd, begin, positions, _as_bytes(rows), targets, size, self._words())
        if index < 0:
            return
        position = int(positions[index])
        at = begin + position * self._record_bytes
        if wrong == 2:
            raise StoreFailed(f"{self.path} is corrupt: the row at position {position} (byte {at}) fails its check")
        try:  # once more, to hear why
            found = len(os.pread(self._fd, self._record_bytes, at))
        except OSError as error:
            raise _failed(self.path, f"cannot be read at byte {at}", error) from error
        raise StoreFailed(f"{self.path} is cut short: {found} of {self._record_bytes} bytes at byte {at}")

    def store(self, positions: Int64, rows: npt.NDArray[np.generic], sources: Int64) -> None:
        """Writes `rows[sources[i]]` as record `positions[i]`, which must have been allocated.

        Raises:
            StoreFailed: a record cannot be written; others may have been.
        """
        begin, size = _HEADER_BYTES, self._row_bytes
        index = store_records(self._fd, begin, positions, _as_bytes(rows), sources, size, self._words())
        if index < 0:
            return
        at = begin + int(positions[index]) * self._record_bytes
        try:  # once more, to hear why: what is there, onto itself
            os.pwrite(self._fd, os.pread(self._fd, self._record_bytes, at).ljust(self._record_bytes, b"\0"), at)
        except OSError as error:
            raise _failed(self.path, f"cannot be written at byte {at}", error) from error
        raise StoreFailed(f"{self.path} cannot be written at byte {at}")

    def sync(self) -> None:
        """Returns once everything written is on the disk. Raises `StoreFailed`."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise _failed(self.path, "cannot be written to disk", error) from error

    def close(self) -> None:
        """Closes the file. Closing twice is harmless."""
        self._file = None  # unmapped once nobody reads it any more
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _mapped(self, positions: Int64) -> npt.NDArray[np.uint64] | None:
        """The whole file, where it holds all of `positions`; None: ask the system for each record, and hear why not.

        Whoever looks at what a file has lost since it was mapped is killed, so its length is asked for before.
        """
        if not len(positions):
            return None
        needed = _HEADER_BYTES + (int(positions.max()) + 1) * self._record_bytes
        file = self._file
        held = os.fstat(self._fd).st_size
        if held < needed:
            return None
        if file is None or 8 * len(file) < needed:
            try:
                memory = mmap.mmap(self._fd, held, mmap.MAP_SHARED, mmap.PROT_READ)
            except OSError:  # there are filesystems that map nothing
                return None
            memory.madvise(mmap.MADV_RANDOM)
            file = self._file = np.frombuffer(memory, np.uint64, held // 8)
        return file

    def _take(self, chunks: Int64) -> None:
        last = int(chunks[-1])
        if last >= len(self._allocated):
            self._allocated = np.concatenate((self._allocated, np.zeros(last + 1, np.bool_)))
        self._allocated[chunks] = True

    def _words(self) -> npt.NDArray[np.uint64]:
        return np.empty(max(1, _RUN_BYTES // self._record_bytes) * self._record_bytes // 8, np.uint64)

    def _no_room(self, length: int, error: OSError) -> StoreFailed:
        disk = os.statvfs(self.path)
        held, free = os.fstat(self._fd).st_size, disk.f_bavail * disk.f_frsize
        return StoreFailed(
            f"{self.path}: no room for {length} bytes more ({error.strerror}); the file has {held} bytes, the disk "
            f"{free} free: give it room, and repeat"
        )


def _header(table: str, part: str, row_bytes: int) -> bytes:
    text = json.dumps({"magic": _MAGIC, "table": table, "part": part, "row_bytes": row_bytes}, sort_keys=True).encode()
    return text + b"\n" + f"{zlib.crc32(text):08x}\n".encode()


def _write_header(fd: int, path: Path, header: bytes) -> None:
    try:
        written = os.pwrite(fd, header.ljust(_HEADER_BYTES, b"\0"), 0)
    except OSError as error:
        raise _failed(path, "cannot be written", error) from error
    if written != _HEADER_BYTES:
        raise StoreFailed(f"{path} cannot be written: {written} of {_HEADER_BYTES} bytes fit")


def _require_header(fd: int, path: Path, wanted: bytes) -> None:
    try:
        found = os.pread(fd, _HEADER_BYTES, 0).rstrip(b"\0")
    except OSError as error:
        raise _failed(path, "cannot be read", error) from error
    if found == wanted:
        return
    text, _, check = found.partition(b"\n")
    if check.strip() != f"{zlib.crc32(text):08x}".encode() or _MAGIC.encode() not in text:
        raise StoreFailed(f"{path} is not a file of rows, or its header is corrupt")
    raise StoreFailed(f"{path} is another file: its header says {text.decode()}, wanted {wanted.decode().split()[0]}")


def _failed(path: Path, what: str, error: OSError) -> StoreFailed:
    return StoreFailed(f"{path} {what}: {error.strerror}")


def _as_bytes(rows: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    assert rows.flags.c_contiguous, "rows that lie apart would be copied"
    return rows.reshape(-1).view(np.uint8)
