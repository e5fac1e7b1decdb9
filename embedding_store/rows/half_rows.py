"""Weights kept in 16 bits: half the memory, rounded at every update so that small steps still count."""

from __future__ import annotations

import threading

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.update_batch import UpdateBatch
from elastable.embedding_store.native.numbers.half_numbers import HALF_DTYPES, gather_half, scatter_half
from elastable.embedding_store.native.slab import Slab, SlabMaker
from elastable.embedding_store.optimizers.base import RowOptimizer
from elastable.embedding_store.rows.initial_values import initial_rows
from elastable.embedding_store.rows.rounding_bits import rounding_bits, rounding_words
from elastable.embedding_store.rows.row_values import RowValues
from elastable.embedding_store.support.scratch import Scratch

__all__ = ["HalfRows"]

_PIECE = 1 << 16  # float32 values that are worked on at a time: 256 KiB, for the processor's second cache


class _Scratch(threading.local):
    """Where a thread works on rows that it updates; used again by the next update."""

    def __init__(self) -> None:
        self.weights, self.bits = Scratch(np.float32), Scratch(np.uint32)


_of_thread = _Scratch()


class HalfRows(RowValues):
    """float16 or bfloat16 numbers, as uint16.

    Reading is exact. Writing rounds to nearest, so that rows read and written
    back are the same. An update computes in float32 and rounds randomly, by
    bits that belong to (seed, table, id, column, step): nearest rounding would
    lose every step smaller than half the distance to the next number.
    """

    def __init__(self, spec: TableSpec, rows: int, new_slab: SlabMaker) -> None:
        self._spec = spec
        self._kind = HALF_DTYPES[spec.dtype]
        self._slab = new_slab("weights", rows, spec.dim, np.uint16)

    def grow(self, rows: int) -> None:
        self._slab.grow(rows)

    def read(self, positions: Int64, out: Float32, stream: bool = False) -> None:
        gather_half(self._kind, self._slab.array, positions, out)

    def slabs(self) -> tuple[Slab, ...]:
        return (self._slab,)

    def write(self, positions: Int64, rows: Float32) -> None:
        """Rounded to nearest."""
        scatter_half(self._kind, rows, None, self._slab.array, positions)

    def initialise(self, ids: Int64, positions: Int64) -> None:
        step = max(1, _PIECE // self._spec.dim)
        for start in range(0, len(ids), step):
            self.write(positions[start : start + step], initial_rows(self._spec, ids[start : start + step]))

    def update(self, optimizer: RowOptimizer, slots: Float32, batch: UpdateBatch) -> None:
        rows, dim = self._slab.array, self._spec.dim
        many = min(len(batch), max(1, _PIECE // dim))
        weights, order = _of_thread.weights.take(many, dim), np.arange(many)
        room = _of_thread.bits.take(rounding_words(self._spec, many))
        for start in range(0, len(batch), many):
            piece = batch.part(start, start + many)
            some = weights[: len(piece)]
            gather_half(self._kind, rows, piece.positions, some)
            optimizer.apply(some, slots, piece.at(piece.positions, order[: len(piece)]))
            bits = rounding_bits(self._spec, piece.ids, piece.step, room)
            scatter_half(self._kind, some, bits, rows, piece.positions)
