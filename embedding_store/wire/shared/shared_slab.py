"""Slabs in memory that other processes of the host may map and read."""

from __future__ import annotations

import logging
import os
import resource
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.native.slab import Slab, anonymous_slab
from elastable.embedding_store.support.memory_mapping import HUGE_PAGE_BYTES, FileMapping
from elastable.embedding_store.wire.shared.sealed_memory import Extent, SealedMemory

__all__ = ["SharedSlab", "SharedSlabs"]

_RESERVE_TIMES = 8  # address space for growth, so that growing moves nothing
_LEAST_RESERVE = 16 << 20
_SHARED_PARTS = frozenset({"live", "index", "cells", "ids", "weights"})
"""What a lookup reads."""

_SMALL_PARTS = frozenset({"index"})
"""Some words for each table: not worth a descriptor."""

_SHARE_A_MEMORY = 64  # slabs
_LOG = logging.getLogger(__name__)
_WORTH_PAGES = 32  # of the 512 in a huge page: with fewer touched, one would hold mostly nothing


class SharedSlab(Slab):
    """A slab in sealed memory, which whoever is handed its descriptor can map to read; gone with the last of them.

    It never shrinks, so that a reader's mapping stays good.

    Args:
        extent: Where it lies; nothing else does.
        rows, columns, dtype: As of `Slab`.
        growing: Called before it grows.

    Attributes:
        extent: Where it lies.
    """

    def __init__(
        self, extent: Extent, rows: int, columns: int, dtype: npt.DTypeLike, growing: Callable[[], None] = lambda: None
    ) -> None:
        """Raises `MemoryError` where the system refuses the memory."""
        self.extent = extent
        self._columns = columns
        self._dtype = np.dtype(dtype)
        self._growing = growing
        self._mapping = self._mapped(rows)
        self._array = self._mapping.view(rows, columns, self._dtype)
        self._huge = np.zeros(0, bool)

    @property
    def shape(self) -> tuple[int, int, str]:
        """Rows, columns and dtype: with the descriptor, all that a reader needs."""
        return len(self.array), self._columns, self._dtype.str

    def grow(self, rows: int) -> None:
        """Grows; a process that has mapped fewer rows can still read those."""
        if rows <= len(self.array):
            return
        self._growing()
        if self.bytes_of(rows) > self._mapping.reserve:
            self._mapping = self._mapped(rows)
        self._array = self._mapping.view(rows, self._columns, self._dtype)

    def make_huge(self) -> Iterator[None]:
        """Backs what is in use with huge pages, as rows are read at random; yields after each of them.

        The system does this by itself for anonymous memory only, unless its administrator says otherwise.

        Raises:
            OSError: the system cannot, or has no huge page free.
        """
        mapping, whole = self._mapping, self.bytes_of(len(self.array)) // HUGE_PAGE_BYTES
        done = np.zeros(whole, bool)
        done[: min(whole, len(self._huge))] = self._huge[:whole]
        self._huge = done
        for page in np.flatnonzero(~done).tolist():
            if mapping.resident_pages(page * HUGE_PAGE_BYTES) >= _WORTH_PAGES:
                mapping.collapse(page * HUGE_PAGE_BYTES)
                done[page] = True
                yield

    def _mapped(self, rows: int) -> FileMapping:
        size = self.bytes_of(rows)
        return self.extent.memory.mapped(self.extent, size, max(size * _RESERVE_TIMES, _LEAST_RESERVE))


class SharedSlabs:
    """The slabs of one store: a `SlabMaker` that counts what readers would have to map anew.

    A slab has a memory and so a descriptor of its own, which gives its pages back as soon as it is gone, while less
    than half of the descriptors that this process may have are in use. After that slabs share memories, 64 in each: the
    number of descriptors is bounded whatever the number of tables.

    Where not even those are to be had, a slab is in memory of this process alone, and so the rows of its table are read
    over gRPC.

    Attributes:
        generation: Counts slabs that were made or have grown.

    Raises:
        OSError: the system cannot share memory.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._made: list[weakref.ref[SharedSlab]] = []
        # Held from the beginning, so that there is one when descriptors have run out.
        self._common = [SealedMemory("rows", _SHARE_A_MEMORY)]
        self._warned = False

    def __call__(self, part: str, rows: int, columns: int, dtype: npt.DTypeLike = np.float32, /) -> Slab:
        if part not in _SHARED_PARTS:
            return anonymous_slab(part, rows, columns, dtype)
        self.changed()
        try:
            slab = SharedSlab(self._extent(part), rows, columns, dtype, self.changed)
        except OSError as error:
            _LOG.info("rows are in memory of this process alone: %s", error)
            return anonymous_slab(part, rows, columns, dtype)
        self._made.append(weakref.ref(slab, self._made.remove))
        return slab

    def changed(self) -> None:
        """Something is to be mapped anew."""
        self.generation += 1

    def alive(self) -> list[SharedSlab]:
        """All slabs that are still in use. May be called beside the thread that makes them."""
        return [slab for made in list(self._made) if (slab := made()) is not None]

    def _extent(self, part: str) -> Extent:
        """Raises `OSError` where there is no descriptor left."""
        if part not in _SMALL_PARTS and self._has_descriptors():
            extent = SealedMemory(part).extent()
        else:
            extent = next((found for memory in self._common if (found := memory.extent()) is not None), None)
        if extent is None:
            self._common.append(SealedMemory("rows", _SHARE_A_MEMORY))
            extent = self._common[-1].extent()
        assert extent is not None
        return extent

    def _has_descriptors(self) -> bool:
        """Whether less than half of them are in use: the lowest free one says so."""
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            lowest = os.dup(self._common[0].fd)
        except OSError:
            return False
        os.close(lowest)
        if most == resource.RLIM_INFINITY or lowest < most // 2:
            return True
        if not self._warned:
            self._warned = True
            _LOG.warning(
                "half of the %d descriptors that this process may have (ulimit -n) are in use: further tables share "
                "memories, which keep what a dropped table held; for tables beyond them raise the limit",
                most,
            )
        return False
