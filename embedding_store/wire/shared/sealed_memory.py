"""Memory that its maker alone can write, in a descriptor that can be given away (why so: docs/decisions.md)."""

import ctypes
import errno
import fcntl
import os
import threading
import weakref
from collections import deque

from elastable.embedding_store.support.memory_mapping import FileMapping, page_mapping, unmap

EXTENT_BYTES = 1 << 40
"""Offsets of an extent, and so the most that it can hold."""

_PAGE = os.sysconf("SC_PAGE_SIZE")
_SEAL_FUTURE_WRITE = 0x0010  # of Linux; Python 3.11 does not name it
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SEAL_SETS = (_SIZE_SEALS | _SEAL_FUTURE_WRITE, _SIZE_SEALS)


class SealedMemory:
    """Some extents behind one descriptor. Safe to use from many threads.

    Args:
        part: Names it in `/proc/PID/maps`.
        extents: How many.

    Attributes:
        fd: Descriptor to hand to others: it can be mapped to read, and no more.

    Raises:
        OSError: the system has no such memory, no descriptor left, or cannot keep others from writing.
        MemoryError: the system refuses the address space.
    """

    def __init__(self, part: str, extents: int = 1) -> None:
        writable = os.memfd_create(f"elastable-{part}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._pages: list[int] = []
        read_only = -1
        try:
            os.fchmod(writable, 0o400)  # holds other users off where the kernel does not know F_SEAL_FUTURE_WRITE
            os.ftruncate(writable, extents * EXTENT_BYTES)  # sparse: it takes memory where it was written to
            for number in range(extents):
                self._pages.append(page_mapping(writable, number * EXTENT_BYTES))
            read_only = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
            _seal(writable)
        except BaseException:
            _release(self._pages, read_only)
            raise
        finally:
            os.close(writable)
        try:  # the lower number, which is free again: the lowest free one tells how many are in use
            self.fd = os.dup(read_only)
        except OSError:
            self.fd = read_only
        else:
            os.close(read_only)
        weakref.finalize(self, _release, self._pages, self.fd).atexit = False
        self._free = deque(range(extents))
        self._ends: dict[int, int] = {}  # bytes that were ever mapped to write, by extent in use
        self._changing = threading.Lock()

    def extent(self) -> "Extent | None":
        """A zeroed extent that nobody else uses, None where there is none left."""
        try:
            number = self._free.popleft()
        except IndexError:
            return None
        return Extent(self, number)

    def mapped(self, extent: "Extent", size: int, reserve: int) -> FileMapping:
        """The first `size` bytes of an extent, to write, with `reserve` bytes of address space to grow into.

        Raises:
            MemoryError: the system refuses, or the extent has not so many.
        """
        if size > EXTENT_BYTES:
            raise MemoryError(f"{size} bytes in one piece of shared memory: the most is {EXTENT_BYTES}")
        reserve = min(reserve, EXTENT_BYTES)
        mapping = FileMapping.grown(self._pages[extent.number], size, reserve, extent)
        with self._changing:
            self._ends[extent.number] = max(self._ends.get(extent.number, 0), mapping.reserve)
        return mapping

    def give_back(self, number: int) -> None:
        """Nobody uses an extent any more: whoever gets it next finds zeros."""
        with self._changing:
            end = self._ends.pop(number, 0)
        if len(self._pages) > 1:  # of a memory with one extent nobody is next
            try:
                self._clear(number, end)
            except (OSError, MemoryError):
                return  # it is not used again
            self._free.appendleft(number)  # its pages are in use already

    def _clear(self, number: int, end: int) -> None:
        """Zeroes what was written. (Pages cannot be given back to the system: that counts as writing.)"""
        base = number * EXTENT_BYTES
        position = base
        while position < base + end:
            try:
                start = os.lseek(self.fd, position, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but holes up to the end
                    return
                raise
            if start >= base + end:
                return
            stop = min(os.lseek(self.fd, start, os.SEEK_HOLE), base + end)
            mapping = FileMapping.grown(self._pages[number], stop - base, stop - base, None)
            ctypes.memset(mapping.address + start - base, 0, stop - start)
            position = stop


class Extent:
    """A part of a `SealedMemory`, which is given back once nothing that was mapped of it is used any more."""

    def __init__(self, memory: SealedMemory, number: int) -> None:
        self.memory = memory
        self.number = number
        weakref.finalize(self, memory.give_back, number).atexit = False

    @property
    def offset(self) -> int:
        """Where it begins in the memory."""
        return self.number * EXTENT_BYTES


def _seal(fd: int) -> None:
    for seals in _SEAL_SETS:
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        except OSError as error:
            if error.errno != errno.EINVAL or seals == _SEAL_SETS[-1]:
                raise
        else:
            return


def _release(pages: list[int], fd: int) -> None:
    for page in pages:
        unmap(page, _PAGE)
    if fd >= 0:
        os.close(fd)


def require_sealed(fd: int, end: int) -> None:
    """Refuses memory of another process under whose reader pages could vanish.

    Args:
        end: Bytes that are going to be read.

    Raises:
        OSError: it is no sealed memory, or shorter.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise OSError(f"what was handed over is no memory that can be sealed: {error}") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise OSError("memory that was handed over is not sealed against shrinking")
    if os.fstatvfs(fd).f_bsize != _PAGE:  # of huge pages there may be none left when one is touched
        raise OSError("memory that was handed over has pages of another size")
    if os.fstat(fd).st_size < end:
        raise OSError(f"memory that was handed over has {os.fstat(fd).st_size} bytes where {end} were announced")
