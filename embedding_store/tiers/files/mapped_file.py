"""A file of items of one size, at positions 0, 1, 2, ...: mapped to be read, written by system calls."""

import errno
import mmap
import os
import struct
import zlib
from pathlib import Path

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.errors import StoreBroken, StoreFailed
from elastable.embedding_store.support.checked_files import OpenFile, store_failures

_MAGIC = b"ELSTTIER"
_HEADER = struct.Struct("<8s8s16sQ")  # magic, kind, token, bytes of an item; a CRC-32 of these follows
_CHECK = struct.Struct("<I")
_HEADER_BYTES = 4096
_CHUNK_BYTES = 1 << 16  # blocks of the disk are taken by so much
_FEWEST_ITEMS = 1024


class MappedFile(OpenFile):
    """The file is as long as the items that it has room for, and sparse; blocks are taken by `allocate`.

    So a full disk is met before anything is written. Items are written by `pwrite`: through the mapping, a file system
    that writes a block elsewhere and has no room for it would end the process. One call writes at a time.

    Attributes:
        path: Of the file.
        begin: Where item 0 lies, in bytes.
        item_bytes: Bytes of an item.
        items: How many the file has room for.
    """

    begin = _HEADER_BYTES

    def __init__(self, path: Path, kind: bytes, item_bytes: int, token: bytes, fresh: bool, items: int) -> None:
        """Opens the file.

        Args:
            path: Of the file. A symbolic link is refused.
            kind: What its items are, at most 8 bytes.
            item_bytes: Bytes of an item.
            token: 16 bytes that the files of one table share, and no others.
            fresh: Whether to begin with an empty file, whatever is there.
            items: How many it must have room for, unless it is fresh.

        Raises:
            StoreBroken: it is missing, cut short, or another file.
            StoreFailed: it cannot be made or opened.
        """
        self.path, self.item_bytes, self.items = path, item_bytes, 0
        self._allocated = np.zeros(1, np.bool_)
        self._chunk = max(1, _CHUNK_BYTES // item_bytes)
        self._mapped: UInt8 | None = None
        fields = _HEADER.pack(_MAGIC, kind, token, item_bytes)
        header = fields + _CHECK.pack(zlib.crc32(fields))
        self.fd = opened_part(path, fresh)
        try:
            if fresh:
                self._begin(header)
            else:
                self._require(header)
                self.items = (self._length() - _HEADER_BYTES) // item_bytes
                self.require_whole(items)
        except BaseException:
            self.close()
            raise

    def require_whole(self, items: int | None = None) -> None:
        """Raises `StoreBroken` if the file was deleted, or has no room for `items` (None: for as many as it had)."""
        items = self.items if items is None else items
        needed = _HEADER_BYTES + items * self.item_bytes if items else 0
        found = os.fstat(self.fd)
        if not found.st_nlink:
            raise StoreBroken(f"{self.path} was deleted: restore a checkpoint into an empty folder")
        if found.st_size < needed:
            raise StoreBroken(
                f"{self.path} is cut short: {found.st_size} bytes where {needed} were written; restore a checkpoint "
                "into an empty folder"
            )

    def allocate(self, positions: Int64) -> None:
        """Makes room for items at `positions`, int64 `[n]`, ascending.

        Raises:
            StoreFailed: the disk, a quota or a limit has no room for them; no item has changed.
        """
        if not len(positions):
            return
        if positions[-1] >= self.items:
            self.grow(int(positions[-1]) + 1)
        chunks = np.unique(positions // self._chunk)
        if chunks[-1] >= len(self._allocated):
            self._allocated = np.concatenate((self._allocated, np.zeros(int(chunks[-1]) + 1, np.bool_)))
        chunks = chunks[~self._allocated[chunks]]
        for run in np.split(chunks, np.flatnonzero(np.diff(chunks) != 1) + 1) if len(chunks) else []:
            first = int(run[0]) * self._chunk
            count = min(len(run) * self._chunk, self.items - first)
            length = count * self.item_bytes
            try:
                os.posix_fallocate(self.fd, _HEADER_BYTES + first * self.item_bytes, length)
            except OSError as error:
                raise self._no_room(length, error) from error
        self._allocated[chunks] = True

    def grow(self, items: int) -> None:
        """Lengthens the file for `items` and for as many again as it may soon need. Raises `StoreFailed`."""
        for size in (max(items, self.items + self.items // 2, _FEWEST_ITEMS), items):
            try:
                os.ftruncate(self.fd, _HEADER_BYTES + size * self.item_bytes)
            except OSError as error:
                failure = error
                continue
            self.items = size
            return
        raise self._no_room((items - self.items) * self.item_bytes, failure) from failure

    def mapped(self) -> UInt8:
        """The file as memory, uint8; empty where it cannot be mapped, or has become shorter.

        Whoever looks at what a file has lost since it was mapped is killed, so its length is asked for each time.
        """
        length, mapped = self._length(), self._mapped
        if mapped is not None and len(mapped) <= length and len(mapped) >= _HEADER_BYTES + self.items * self.item_bytes:
            return mapped
        if length < _HEADER_BYTES + self.items * self.item_bytes:
            return np.empty(0, np.uint8)
        try:
            memory = mmap.mmap(self.fd, length, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError:  # there are file systems that map nothing
            return np.empty(0, np.uint8)
        memory.madvise(mmap.MADV_RANDOM)
        self._mapped = np.frombuffer(memory, np.uint8)
        return self._mapped

    def data_ranges(self) -> list[tuple[int, int]]:
        """Ranges of positions that may hold anything but zeros, ascending; the rest of the file has no blocks."""
        found, at, end = list[tuple[int, int]](), _HEADER_BYTES, _HEADER_BYTES + self.items * self.item_bytes
        while at < end:
            try:
                start = os.lseek(self.fd, at, os.SEEK_DATA)
                at = min(os.lseek(self.fd, start, os.SEEK_HOLE), end)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but holes from here on
                    break
                return [(0, self.items)]
            first = max((start - _HEADER_BYTES) // self.item_bytes, found[-1][1] if found else 0)
            stop = min(-(-(at - _HEADER_BYTES) // self.item_bytes), self.items)
            if first < stop:
                found.append((first, stop))
        return found

    def expect(self, start: int, stop: int) -> None:
        """Lets the system begin to read items `start..stop`, where it does not hold them in memory."""
        os.posix_fadvise(
            self.fd, _HEADER_BYTES + start * self.item_bytes, (stop - start) * self.item_bytes, os.POSIX_FADV_WILLNEED
        )

    def write_failed(self, position: int) -> StoreFailed:
        """Why the item at `position` could not be written: writes once more what is there, to hear it."""
        at = _HEADER_BYTES + position * self.item_bytes
        try:
            os.pwrite(self.fd, os.pread(self.fd, self.item_bytes, at).ljust(self.item_bytes, b"\0"), at)
        except OSError as error:
            return StoreFailed(f"{self.path} cannot be written at byte {at}: {error.strerror}")
        return StoreFailed(f"{self.path} cannot be written at byte {at}")

    def read_failed(self, position: int) -> StoreFailed:
        """Why the item at `position` is not what was written."""
        at = _HEADER_BYTES + position * self.item_bytes
        try:
            self.require_whole()
            os.pread(self.fd, self.item_bytes, at)
        except StoreBroken as error:
            return error
        except OSError as error:
            return StoreFailed(f"{self.path} cannot be read at byte {at}: {error.strerror}")
        return StoreBroken(
            f"{self.path} is corrupt: the record at position {position} (byte {at}) fails its check; restore a "
            "checkpoint into an empty folder"
        )

    def sync(self) -> None:
        """Returns once everything written is on the disk. Raises `StoreFailed`."""
        with store_failures(self.path, "cannot be written to disk"):
            os.fsync(self.fd)

    def close(self) -> None:
        self._mapped = None  # unmapped once nobody reads it any more
        super().close()

    def _length(self) -> int:
        return os.fstat(self.fd).st_size

    def _begin(self, header: bytes) -> None:
        with store_failures(self.path, "cannot be written"):
            written = os.pwrite(self.fd, header.ljust(_HEADER_BYTES, b"\0"), 0)
            os.fsync(self.fd)
        if written != _HEADER_BYTES:
            raise StoreFailed(f"{self.path} cannot be written: {written} of {_HEADER_BYTES} bytes fit")

    def _require(self, header: bytes) -> None:
        with store_failures(self.path, "cannot be read"):
            found = os.pread(self.fd, _HEADER_BYTES, 0)
        if found != header.ljust(_HEADER_BYTES, b"\0"):
            raise StoreBroken(
                f"{self.path} is another file than the one that was written, or its header is corrupt: restore a "
                "checkpoint into an empty folder"
            )

    def _no_room(self, length: int, error: OSError) -> StoreFailed:
        disk = os.statvfs(self.path)
        held, free = os.fstat(self.fd).st_blocks * 512, disk.f_bavail * disk.f_frsize
        return StoreFailed(
            f"{self.path}: no room for {length} bytes more ({error.strerror}); the file takes {held} bytes, the disk "
            f"has {free} free: give it room, and repeat"
        )


def opened_part(path: Path, fresh: bool) -> int:
    """A descriptor to read and write a file of a tier, not through a link; `fresh`: it is made, or emptied.

    Raises:
        StoreBroken: it is missing.
        StoreFailed: it cannot be made or opened.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_TRUNC if fresh else 0)
    with store_failures(path, "cannot be opened"):
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError as error:
            raise StoreBroken(f"{path} is missing: restore a checkpoint into an empty folder") from error
