"""Disk blocks that a growing file has before it is written to."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence

from elastable.embedding_store.log.contract import Buffer

__all__ = ["ReservedBlocks"]

_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 16 << 20


class ReservedBlocks:
    """Reserves blocks ahead of the end of a file, whose length stays as it is.

    Linux writes to reserved blocks with less work, as the file system need not find room for every page. Where the
    system cannot reserve blocks, or none are free, nothing is reserved, and writing says what is wrong.
    """

    def __init__(self) -> None:
        self._fallocate = _system_call()
        self._end = 0
        self._works = True

    def begin(self, end: int) -> None:
        """Another file is written from now on, from byte `end`."""
        self._end, self._works = end, self._fallocate is not None

    def reserve(self, fd: int, begin: int, parts: Sequence[Buffer]) -> None:
        """Makes sure that there are blocks for `parts`, which are written from byte `begin` on; reserves some more."""
        end = begin + sum(memoryview(part).nbytes for part in parts)
        if self._works and self._fallocate is not None and end > self._end:
            more = end - self._end + min(max(end, _LEAST_BYTES), _MOST_BYTES)
            self._works = not self._fallocate(fd, _KEEP_SIZE, self._end, more)
            self._end += more

    def give_back(self, fd: int, end: int) -> None:
        """Frees the blocks behind byte `end`, where the file ends. Raises `OSError`."""
        if end < self._end:
            os.ftruncate(fd, end)  # which frees them, although the length stays
            self._end = end


def _system_call() -> ctypes._NamedFuncPointer | None:
    """`fallocate` of the C library; None: this system has none."""
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None).fallocate
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return function
