"""Rows in memory that may lie elsewhere too: frames, and the bytes of which they consist."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.table_rows import ResidentRows
from elastable.embedding_store.native.slab import Slab
from elastable.embedding_store.optimizers.base import RowOptimizer

__all__ = ["Frames", "Scratches"]

_SCRATCH_BYTES = 1 << 18
_KEPT = 2  # scratches, for the next caller


class Frames:
    """Rows in memory, whatever their dtype, and the slabs that hold their parts.

    Attributes:
        rows: The rows, by frame.
        parts: Part ("weights", "slots", ...) -> its slab, a row a frame.
    """

    def __init__(self, spec: TableSpec, optimizer: RowOptimizer, rows: int) -> None:
        """Room for `rows` rows; memory is taken as it is touched."""
        self.parts: dict[str, Slab] = {}
        self.rows = ResidentRows(spec, optimizer, rows, self._slab)

    def row_bytes(self) -> dict[str, int]:
        """Bytes of a row by part, of parts that take any."""
        sizes = {part: slab.array.shape[1] * slab.array.itemsize for part, slab in self.parts.items()}
        return {part: size for part, size in sizes.items() if size}

    def _slab(self, part: str, rows: int, columns: int, dtype: npt.DTypeLike = np.float32, /) -> Slab:
        self.parts[part] = Slab(rows, columns, dtype)
        return self.parts[part]


class Scratches:
    """Frames for rows on their way, lent to one caller at a time.

    Attributes:
        rows: Frames of a scratch.
    """

    def __init__(self, spec: TableSpec, optimizer: RowOptimizer, row_bytes: int) -> None:
        """`row_bytes`: of one row of the table, all parts together."""
        self.rows = max(64, _SCRATCH_BYTES // row_bytes)
        self._spec, self._optimizer = spec, optimizer
        self._lock = threading.Lock()
        self._idle: list[Frames] = []

    @contextmanager
    def one(self) -> Iterator[Frames]:
        """A scratch that nobody else has meanwhile; it holds whatever it held."""
        with self._lock:
            found = self._idle.pop() if self._idle else None
        scratch = Frames(self._spec, self._optimizer, self.rows) if found is None else found
        try:
            yield scratch
        finally:
            with self._lock:
                if len(self._idle) < _KEPT:
                    self._idle.append(scratch)
