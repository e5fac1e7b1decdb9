"""Files and memory that has a descriptor, mapped where huge pages can be used.

Python's own `mmap` maps where the system likes, and a range is only ever backed by a huge page where address and file
offset agree modulo 2 MiB. Here every mapping begins on such a boundary.
"""

import ctypes
import mmap
import os
import weakref
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

S = TypeVar("S", bound=np.generic)

HUGE_PAGE_BYTES = 2 << 20

_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value
_RANGES = 4  # that the kernel counts of a reservation: what is mapped of it, before, behind, and the page it grew from
_reserved: set[int] = set()  # where reservations of this process begin

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class FileMapping:
    """Bytes of a descriptor's memory, shared with whoever else maps them.

    The address space behind them belongs to the mapping too, up to `reserve`
    bytes: to write, it is where the file may grow into; to read, it reads as
    zeros, so that an index read in the middle of another process' change finds
    nothing and breaks nothing. It is given back once no array looks at it.

    Args:
        fd: Of the memory; it may be closed afterwards.
        size: Bytes of it.
        reserve: Bytes of address space, at least `size`.
        writable: Whether this process writes.
        offset: Where in the memory they begin, a multiple of the page size.

    Raises:
        MemoryError: the system refuses the address space.
    """

    def __init__(self, fd: int, size: int, reserve: int, writable: bool, offset: int = 0) -> None:
        self._reserve(max(reserve, size), _PROT_NONE if writable else _PROT_READ, None)
        access = _PROT_READ | _PROT_WRITE if writable else _PROT_READ
        # Memory beyond the end of the file cannot be touched, but it is mapped already where the file grows.
        length = self.reserve if writable else _whole_pages(size, mmap.PAGESIZE)
        _map(self.address, length, access, _MAP_SHARED | _MAP_FIXED, fd, offset)
        self._prefer_huge_pages(length)

    @classmethod
    def grown(cls, page: int, size: int, reserve: int, keeps: object) -> "FileMapping":
        """The memory from the first byte of a writable `page_mapping` on, whatever its seals forbid by now.

        Args:
            page: The address of that mapping, which stays.
            size: Bytes of it.
            reserve: Bytes of address space, at least `size`; the file must be as long.
            keeps: Kept alive as long as the mapping.

        Raises:
            MemoryError: the system refuses the address space.
        """
        mapping = cls.__new__(cls)
        mapping._reserve(max(reserve, size), _PROT_NONE, keeps)
        # An old size of 0 makes another mapping of the same shared memory.
        how = _MREMAP_MAYMOVE | _MREMAP_FIXED
        if _libc.mremap(page, 0, mapping.reserve, how, mapping.address) == _FAILED:
            raise _refused(mapping.reserve)
        mapping._prefer_huge_pages(mapping.reserve)
        return mapping

    def _reserve(self, size: int, access: int, keeps: object) -> None:
        whole = _whole_pages(size, HUGE_PAGE_BYTES)
        start = _map(None, whole + HUGE_PAGE_BYTES, access, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        self.address = _whole_pages(start, HUGE_PAGE_BYTES)
        self.reserve = whole
        _reserved.add(start)
        self._memory = (ctypes.c_char * whole).from_address(self.address)
        weakref.finalize(self._memory, unmap, start, whole + HUGE_PAGE_BYTES, keeps).atexit = False

    def _prefer_huge_pages(self, length: int) -> None:
        if length >= HUGE_PAGE_BYTES:
            _libc.madvise(self.address, length, _MADV_HUGEPAGE)

    def view(self, rows: int, columns: int, dtype: np.dtype[S]) -> npt.NDArray[S]:
        """The first bytes as `[rows, columns]`; the mapping lasts as long as its views."""
        return np.frombuffer(memoryview(self._memory), dtype, rows * columns).reshape(rows, columns)

    def resident_pages(self, start: int) -> int:
        """How many pages of the 2 MiB from byte `start` on are in memory."""
        pages = HUGE_PAGE_BYTES // mmap.PAGESIZE
        found = np.zeros(pages, np.uint8)
        if _libc.mincore(self.address + start, HUGE_PAGE_BYTES, found.ctypes.data):
            return 0
        return int((found & 1).sum())

    def collapse(self, start: int) -> None:
        """Makes one huge page of the 2 MiB from byte `start` on.

        Raises:
            OSError: the system cannot, or has none free.
        """
        if _libc.madvise(self.address + start, HUGE_PAGE_BYTES, _MADV_COLLAPSE):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))


def page_mapping(fd: int, offset: int) -> int:
    """The address of one page of a descriptor's memory, mapped to write; for `unmap`.

    Raises:
        MemoryError: the system refuses.
    """
    return _map(None, mmap.PAGESIZE, _PROT_READ | _PROT_WRITE, _MAP_SHARED, fd, offset)


def unmap(start: int, size: int, keeps: object = None) -> None:
    """Takes a mapping away; `keeps` is let go of."""
    _reserved.discard(start)  # first: another one may begin there afterwards
    _libc.munmap(start, size)


@cache
def most_ranges() -> int:
    """How many ranges of memory the system lets a process map (vm.max_map_count)."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return 65_530


def mappings_are_scarce() -> bool:
    """Whether three quarters of `most_ranges` may be in use: without the rest code cannot be compiled, nor tables grow.

    A process that the system refuses a range may end by a signal, wherever that happens in its libraries.
    """
    return _RANGES * len(_reserved) > most_ranges() // 4 * 3


def _map(address: int | None, size: int, access: int, flags: int, fd: int, offset: int = 0) -> int:
    found = _libc.mmap(address, size, access, flags, fd, offset)
    if found == _FAILED:
        raise _refused(size)
    return int(found)


def _refused(size: int) -> MemoryError:
    return MemoryError(f"the system refuses to map {size} bytes: {os.strerror(ctypes.get_errno())}")


def _whole_pages(value: int, page: int) -> int:
    return -(-value // page) * page
