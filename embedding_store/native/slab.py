"""Memory for rows: zeroed, given by the system page by page as it is touched."""

import mmap
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Array

S = TypeVar("S", bound=np.generic)

_NO_RESERVE = 0x4000  # MAP_NORESERVE on Linux, which Python 3.11 does not name
_HUGE_PAGE = 2 << 20


class Slab:
    """A growing array `[rows, columns]` in anonymous memory.

    A fresh slab costs address space only. Large ones ask for huge pages, since rows are read at random. Growing moves
    page tables, not bytes; it needs that no view of `array` is kept, and copies where one is.

    Attributes:
        array: `[rows, columns]`, C-contiguous, writable; take it anew after `grow`.
    """

    def __init__(self, rows: int, columns: int, dtype: npt.DTypeLike = np.float32) -> None:
        """Raises `MemoryError` where the system refuses the address space."""
        self._columns = columns
        self._dtype = np.dtype(dtype)
        self._memory = _anonymous(self.bytes_of(rows))
        self.array: Array = self._view(rows)

    def grow(self, rows: int) -> None:
        """Makes room for at least `rows` rows; new ones are zero.

        Raises:
            MemoryError: the system refuses; the slab is as it was.
        """
        before = len(self.array)
        if rows <= before:
            return
        del self.array  # a mapping with a view cannot be resized
        try:
            self._memory.resize(self.bytes_of(rows))
        except (BufferError, SystemError):  # someone looks at it, or the system cannot resize
            self.array = self._copied(before, rows)
        except OSError as error:
            self.array = self._view(before)
            raise MemoryError(f"no room to grow from {before} to {rows} rows: {error}") from error
        else:
            _prefer_huge_pages(self._memory)
            self.array = self._view(rows)

    def _copied(self, before: int, rows: int) -> npt.NDArray[np.generic]:
        old = self._view(before)
        try:
            self._memory = _anonymous(self.bytes_of(rows))
        except MemoryError:
            self.array = old
            raise
        new = self._view(rows)
        new[:before] = old
        return new

    def _view(self, rows: int) -> npt.NDArray[np.generic]:
        flat = np.frombuffer(self._memory, self._dtype, count=rows * self._columns)
        return flat.reshape(rows, self._columns)

    def bytes_of(self, rows: int) -> int:
        """Bytes of memory that so many rows take: whole pages."""
        size = max(mmap.PAGESIZE, rows * self._columns * self._dtype.itemsize)
        # Whole huge pages are put where huge pages begin, also when they move; else growth breaks them up.
        return size if size < _HUGE_PAGE else -(-size // _HUGE_PAGE) * _HUGE_PAGE


class SlabMaker(Protocol):
    """Where a table's slabs come from: anonymous memory, a file, memory that processes share."""

    def __call__(self, part: str, rows: int, columns: int, dtype: npt.DTypeLike = np.float32, /) -> Slab:
        """A zeroed slab for one part of a table: "weights", "slots", "cells", "ids", "live"."""
        ...


def anonymous_slab(part: str, rows: int, columns: int, dtype: npt.DTypeLike = np.float32, /) -> Slab:
    """Memory of this process alone, whatever the part."""
    return Slab(rows, columns, dtype)


def _anonymous(size: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", _NO_RESERVE)
    try:
        memory = mmap.mmap(-1, size, flags=flags)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"the system refuses {size} bytes of address space: {error}") from error
    _prefer_huge_pages(memory)
    return memory


def _prefer_huge_pages(memory: mmap.mmap) -> None:
    if len(memory) >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return  # a kernel without huge pages: slower, not wrong


# Arrays that a loop uses again and again, so that its steps allocate nothing


class Scratch(Generic[S]):
    """One array that is handed out anew each time, and only grows. Not for two users at once."""

    def __init__(self, dtype: type[S]) -> None:
        self._array: npt.NDArray[S] = np.empty(0, dtype)

    def take(self, rows: int, columns: int | None = None) -> npt.NDArray[S]:
        """`[rows]` or `[rows, columns]`, C-contiguous, holding anything; the array taken before is void."""
        size = rows if columns is None else rows * columns
        if size > len(self._array):
            # An eighth more than needed: batches whose sizes vary a little settle at once.
            self._array = np.empty(size + size // 8, self._array.dtype)
        flat = self._array[:size]
        return flat if columns is None else flat.reshape(rows, columns)
