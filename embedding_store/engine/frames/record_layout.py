"""Rows as records of a tier: weights first, then slots, then when the row was touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.row_moves import copy_bytes
from elastable.embedding_store.native.slab import Slab, SlabMaker

__all__ = ["TOUCH_BYTES", "RecordLayout", "RowParts"]

TOUCH_BYTES = 16
"""int64 `[2]`, `RowBlock.touches`, little-endian, at the end of a record of a table with eviction."""


class RecordLayout:
    """Where in a record the parts of a row are.

    Attributes:
        parts: Name -> bytes, in the order in which a record holds them.
        record_bytes: Of a whole record.
        slots_at: Bytes before the slots: those of the weights.
    """

    def __init__(self, slabs: Mapping[str, Slab], with_touches: bool) -> None:
        """`slabs`: part of a row -> the slab that holds it, a row a frame. Slots, if any, come after the weights."""
        sizes = {part: slab.array.shape[1] * slab.array.itemsize for part, slab in slabs.items()}
        self.parts = {part: size for part, size in sizes.items() if size}
        row_bytes = sum(self.parts.values())
        self.slots_at = row_bytes - self.parts.get("slots", 0)
        self._touches_at = row_bytes if with_touches else None
        self.record_bytes = row_bytes + (TOUCH_BYTES if with_touches else 0)

    def pack(self, slabs: Mapping[str, Slab], frames: Int64, touches: Int64 | None, records: UInt8) -> None:
        """Copies rows into records.

        Args:
            slabs: Of the parts.
            frames: int64 `[n]`, where in them the rows are.
            touches: int64 `[n, 2]`, of a table with eviction.
            records: uint8 `[n, record_bytes]`.
        """
        at = 0
        for part, size in self.parts.items():
            _pack(_as_bytes(slabs[part]), size, frames, records.reshape(-1), records.shape[1], at)
            at += size
        if self._touches_at is not None and touches is not None:
            records[:, self._touches_at :] = touches.astype("<i8", copy=False).view(np.uint8)

    def unpack(self, records: UInt8, indices: Int64, slabs: Mapping[str, Slab], frames: Int64) -> None:
        """Copies records into rows, as many parts as there are in them.

        Args:
            records: uint8 `[m, bytes]`, whole or only their first bytes.
            indices: int64 `[n]`, which of them.
            slabs: Of the parts.
            frames: int64 `[n]`: record `indices[i]` becomes row `frames[i]`.
        """
        at = 0
        for part, size in self.parts.items():
            if at + size > records.shape[1]:
                return
            _unpack(records.reshape(-1), records.shape[1], at, indices, _as_bytes(slabs[part]), size, frames)
            at += size

    def described(self) -> Sequence[tuple[str, int]]:
        """The parts and their bytes, in order, for a tier's description."""
        touches = [] if self._touches_at is None else [("touches", TOUCH_BYTES)]
        return [*self.parts.items(), *touches]


class RowParts:
    """Makes slabs, and remembers which part of a row each holds."""

    def __init__(self, new_slab: SlabMaker) -> None:
        self._new_slab = new_slab
        self.slabs: dict[str, Slab] = {}

    def __call__(self, part: str, rows: int, columns: int, dtype: npt.DTypeLike = np.float32, /) -> Slab:
        self.slabs[part] = self._new_slab(part, rows, columns, dtype)
        return self.slabs[part]


def _as_bytes(slab: Slab) -> UInt8:
    array: UInt8 = slab.array.view(np.uint8).reshape(-1)
    return array


@kernel
def _pack(rows: UInt8, size: int, frames: Int64, records: UInt8, stride: int, at: int) -> None:
    for i in range(len(frames)):
        copy_bytes(records, i * stride + at, rows, frames[i] * size, size)


@kernel
def _unpack(records: UInt8, stride: int, at: int, indices: Int64, rows: UInt8, size: int, frames: Int64) -> None:
    for i in range(len(frames)):
        copy_bytes(rows, frames[i] * size, records, indices[i] * stride + at, size)
