"""Memory for rows that other processes may map: in descriptors, without a name in any file system."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.files.mapping import HUGE_PAGE_BYTES, FileMapping
from elastable.embedding_store.memory.slab import Slab, anonymous_slab

__all__ = ["SharedSlab", "SharedSlabs"]

_RESERVE_TIMES = 8  # address space for growth, so that growing moves nothing
_LEAST_RESERVE = 16 << 20
_SHARED_PARTS = frozenset({"live", "index", "cells", "ids", "weights"})
"""What a lookup reads."""

_WORTH_PAGES = 32  # of the 512 in a huge page: with fewer touched, one would hold mostly nothing


class SharedSlab(Slab):
    """A slab in a memfd: whoever is handed its descriptor can map it, and it is gone with the last of them.

    It never shrinks, so that a reader's mapping stays good.

    Args:
        part: Names it in `/proc/PID/maps`.
        rows, columns, dtype: As of `Slab`.
        growing: Called before it grows.

    Attributes:
        fd: The descriptor.
    """

    def __init__(
        self, part: str, rows: int, columns: int, dtype: npt.DTypeLike, growing: Callable[[], None] = lambda: None
    ) -> None:
        """Raises `MemoryError` where the system refuses the memory, `OSError` where it has no descriptor left."""
        self._columns = columns
        self._dtype = np.dtype(dtype)
        self._growing = growing
        self.fd = os.memfd_create(f"elastable-{part}", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd).atexit = False
        self._mapping = self._mapped(rows)
        self._array = self._mapping.view(rows, columns, self._dtype)
        self._huge = np.zeros(0, bool)

    @property
    def shape(self) -> tuple[int, int, str]:
        """Rows, columns and dtype: with the descriptor, all that a reader needs."""
        return len(self.array), self._columns, self._dtype.str

    def grow(self, rows: int) -> None:
        """As in `Slab.grow`; whoever has mapped fewer rows goes on reading those."""
        if rows <= len(self.array):
            return
        self._growing()
        if self._bytes(rows) <= self._mapping.reserve:
            self._resize(rows)
        else:
            self._mapping = self._mapped(rows)
        self._array = self._mapping.view(rows, self._columns, self._dtype)

    def make_huge(self) -> Iterator[None]:
        """Backs what is in use with huge pages, as rows are read at random; yields after each of them.

        The system does this by itself for anonymous memory only, unless its
        administrator says otherwise.

        Raises:
            OSError: the system cannot, or has no huge page free.
        """
        mapping, whole = self._mapping, self._bytes(len(self.array)) // HUGE_PAGE_BYTES
        done = np.zeros(whole, bool)
        done[: min(whole, len(self._huge))] = self._huge[:whole]
        self._huge = done
        for page in np.flatnonzero(~done).tolist():
            if mapping.resident_pages(page * HUGE_PAGE_BYTES) >= _WORTH_PAGES:
                mapping.collapse(page * HUGE_PAGE_BYTES)
                done[page] = True
                yield

    def _mapped(self, rows: int) -> FileMapping:
        size = self._bytes(rows)
        self._resize(rows)
        return FileMapping(self.fd, size, max(size * _RESERVE_TIMES, _LEAST_RESERVE), writable=True)

    def _resize(self, rows: int) -> None:
        try:
            os.ftruncate(self.fd, self._bytes(rows))
        except OSError as error:
            raise MemoryError(f"no room for {rows} rows of shared memory: {error}") from error


class SharedSlabs:
    """The slabs of one store: a `SlabMaker` that counts what readers would have to map anew.

    Where the system has no descriptor left, a slab is in memory of this
    process alone, and so the rows of its table are read over gRPC.

    Attributes:
        generation: Counts slabs that were made or have grown.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._made: list[weakref.ref[SharedSlab]] = []

    def __call__(self, part: str, rows: int, columns: int, dtype: npt.DTypeLike = np.float32, /) -> Slab:
        """As in `SlabMaker`."""
        if part not in _SHARED_PARTS:
            return anonymous_slab(part, rows, columns, dtype)
        self.changed()
        try:
            slab = SharedSlab(part, rows, columns, dtype, self.changed)
        except OSError:
            return anonymous_slab(part, rows, columns, dtype)
        self._made.append(weakref.ref(slab, self._made.remove))
        return slab

    def changed(self) -> None:
        """Something is to be mapped anew."""
        self.generation += 1

    def alive(self) -> list[SharedSlab]:
        """All slabs that are still in use. May be called beside the thread that makes them."""
        return [slab for made in list(self._made) if (slab := made()) is not None]
