"""Weights kept in 8 bits, for serving: a quarter of the memory, quantised row by row."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64, UInt8
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.update_batch import UpdateBatch
from elastable.embedding_store.errors import Unsupported
from elastable.embedding_store.native.kernel import kernel, prefetch
from elastable.embedding_store.native.numbers.number_bits import bits_of, float_of
from elastable.embedding_store.native.numbers.wide_rows import with_gaps
from elastable.embedding_store.native.slab import Slab, SlabMaker
from elastable.embedding_store.optimizers.base import RowOptimizer
from elastable.embedding_store.rows.row_values import RowValues

__all__ = ["Int8Rows", "gather_int8", "scatter_int8"]


_AHEAD = 16


class Int8Rows(RowValues):
    """Each row as integers q from -127 to 127 and one scale: the row reads q * scale.

    The scale is the largest size in the row by 127, cut to 17 significant bits,
    so that q * scale is exact in float32: a row that is read and written back
    stays as it was. No value is off by more than half a scale. Rows lie as dim
    bytes of q and 4 bytes of scale, so that one miss of the cache fetches both.

    Such tables are not trained: `elastable.embedding_store.rows.checks.require_update` refuses it.
    """

    def __init__(self, spec: TableSpec, rows: int, new_slab: SlabMaker) -> None:
        self._spec = spec
        self._slab = new_slab("weights", rows, spec.weight_bytes, np.uint8)

    def grow(self, rows: int) -> None:
        self._slab.grow(rows)

    def read(self, positions: Int64, out: Float32, stream: bool = False) -> None:
        gather_int8(self._slab.array, positions, out)

    def slabs(self) -> tuple[Slab, ...]:
        return (self._slab,)

    def write(self, positions: Int64, rows: Float32) -> None:
        """Quantised; the numbers must be finite."""
        scatter_int8(rows, self._slab.array, positions)

    def initialise(self, ids: Int64, positions: Int64) -> None:
        """Raises `Unsupported`: rows of such a table begin with `write`."""
        raise self._untrained()

    def update(self, optimizer: RowOptimizer, slots: Float32, batch: UpdateBatch) -> None:
        """Raises `Unsupported`."""
        raise self._untrained()

    def _untrained(self) -> Unsupported:
        return Unsupported(f"table {self._spec.name!r}: int8 rows are for serving and cannot be trained")


def gather_int8(rows: UInt8, positions: Int64, out: Float32) -> None:
    """out[i] = the numbers of rows[positions[i]]; rows of `out` at negative positions are left alone.

    Args:
        rows: uint8 `[rows, dim + 4]`: dim bytes of q, two's complement, and the scale, a little-endian float32.
        positions: int64 `[n]`.
        out: float32 `[n, dim]`; rows may lie apart, columns may not.
    """
    _gather(rows, positions, with_gaps(out))


_EXACT = np.uint32(0xFFFFFF80)  # the 17 leading bits of a float32's 24
_LEAST_SCALE = np.float32(2.0**-110)  # smaller ones would have products that are not exact


@kernel
def _gather(rows: UInt8, positions: Int64, out: Float32) -> None:
    count, dim = len(positions), rows.shape[1] - 4
    for i in range(count):
        prefetch(rows, positions[min(i + _AHEAD, count - 1)])
        p = positions[i]
        if p >= 0:
            low = np.uint32(rows[p, dim]) | (np.uint32(rows[p, dim + 1]) << np.uint32(8))
            high = np.uint32(rows[p, dim + 2]) | (np.uint32(rows[p, dim + 3]) << np.uint32(8))
            scale = float_of(np.uint32(low | (high << np.uint32(16))))
            for j in range(dim):
                out[i, j] = np.float32(np.int8(rows[p, j])) * scale


@kernel
def scatter_int8(values: Float32, rows: UInt8, positions: Int64) -> None:
    """rows[positions[i]] = values[i] float32 `[n, dim]`, quantised; `positions` int64 `[n]`, each once."""
    count, dim = values.shape
    for i in range(count):
        p = positions[i]
        largest = np.float32(0)
        for j in range(dim):
            largest = max(largest, abs(values[i, j]))
        bits = np.uint32(bits_of(max(_LEAST_SCALE, largest / np.float32(127))) & _EXACT)
        scale = np.float64(float_of(bits))
        for j in range(dim):
            # In double, where the quotient cannot be rounded onto a tie that it is not.
            rows[p, j] = np.uint8(np.int8(np.rint(np.float64(values[i, j]) / scale)))
        for k in range(4):
            rows[p, dim + k] = np.uint8((bits >> np.uint32(8 * k)) & np.uint32(0xFF))
