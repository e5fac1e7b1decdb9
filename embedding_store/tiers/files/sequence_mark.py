"""How far writes to a file tier have got: a few bytes that are written before each of them, for who comes after."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

from elastable.embedding_store.errors import StoreBroken, StoreFailed

__all__ = ["SequenceMark"]

_SLOT = struct.Struct("<QQ")  # sequence, save; a CRC-32 of these and 4 zero bytes follow
_CHECK = struct.Struct("<II")
_SLOT_BYTES = 4096  # each on blocks of its own: a write that breaks off leaves the other one


class SequenceMark:
    """Two slots in turn; the one with the greater numbers counts. A slot that is torn had not been relied on yet.

    Attributes:
        sequence: Of the last write that began; 0: there was none.
        save: Number of the save after which it began; 0: there was none.
    """

    def __init__(self, path: Path, fresh: bool, fsync: bool) -> None:
        """Opens the file, or makes it.

        Args:
            path: Of the file. A symbolic link is refused.
            fresh: Whether to begin anew.
            fsync: Whether a mark is on the disk before the write that it stands for begins.

        Raises:
            StoreBroken: it is missing or corrupt.
            StoreFailed: it cannot be made or opened.
        """
        self._path, self._fsync, self._slot = path, fsync, 0
        self.sequence = self.save = 0
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_TRUNC if fresh else 0)
        try:
            self._fd = os.open(path, flags, 0o600)
        except FileNotFoundError as error:
            raise StoreBroken(f"{path} is missing: restore a checkpoint into an empty folder") from error
        except OSError as error:
            raise StoreFailed(f"{path} cannot be opened: {error.strerror}") from error
        try:
            if fresh:
                self._write(0, 0)
                self._write(0, 0)
                os.fsync(self._fd)
            else:
                self._read()
        except OSError as error:
            self.close()
            raise StoreFailed(f"{path} cannot be used: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def put(self, sequence: int, save: int) -> None:
        """Says that a write of `sequence` is about to begin. Raises `StoreFailed`: it must not."""
        if (sequence, save) == (self.sequence, self.save):
            return
        try:
            self._write(sequence, save)
            if self._fsync:
                os.fdatasync(self._fd)
        except OSError as error:
            raise StoreFailed(f"{self._path} cannot be written: {error.strerror}") from error
        self.sequence, self.save = sequence, save

    def close(self) -> None:
        """Closes the file. Closing twice is harmless."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _write(self, sequence: int, save: int) -> None:
        fields = _SLOT.pack(sequence, save)
        content = fields + _CHECK.pack(zlib.crc32(fields), 0)
        if os.pwrite(self._fd, content, self._slot * _SLOT_BYTES) != len(content):
            raise OSError(28, "No space left on device")
        self._slot = 1 - self._slot

    def _read(self) -> None:
        found = list[tuple[int, int, int]]()
        for slot in range(2):
            content = os.pread(self._fd, _SLOT.size + _CHECK.size, slot * _SLOT_BYTES)
            if len(content) == _SLOT.size + _CHECK.size:
                fields = content[: _SLOT.size]
                if _CHECK.unpack_from(content, _SLOT.size) == (zlib.crc32(fields), 0):
                    sequence, save = _SLOT.unpack(fields)
                    found.append((save, sequence, slot))
        if not found:
            raise StoreBroken(f"{self._path} is corrupt: restore a checkpoint into an empty folder")
        self.save, self.sequence, slot = max(found)
        self._slot = 1 - slot
