"""Records that lie in NumPy arrays, in memory or memory-mapped."""

from __future__ import annotations

from typing import Any

import numpy as np

from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.nests import Array, as_arrays, map_arrays, named_arrays, records_of
from elastable.worker.readers.reader import Batch, Int64, Reader, checked_indices

__all__ = ["NumpyReader"]


class NumpyReader(Reader):
    """Arrays whose first axis is the records.

    Args:
        x: Features: an array, or a dict/tuple/list nest of arrays. Whatever has
            `__array__` will do (a memory-mapped .npy file, a pandas Series, a tensor).
        y: Targets, likewise; None: batches are `(x,)`.
        sample_weight: Weights, likewise.
        name: What errors call this source.

    Raises:
        BadInput: no records, lengths that differ, or leaves that are no arrays.
    """

    def __init__(self, x: Any, y: Any = None, sample_weight: Any = None, *, name: str = "arrays") -> None:
        if sample_weight is not None and y is None:
            raise BadInput(f"{name}: sample_weight without y; weights belong to targets")
        given = {"x": x, "y": y, "sample_weight": sample_weight}
        parts = {part: as_arrays(nest, part) for part, nest in given.items() if part == "x" or nest is not None}
        leaves = [leaf for part, nest in parts.items() for leaf in named_arrays(nest, part)]
        self._records = records_of(leaves, name)
        self._parts: Batch = tuple(parts.values())
        self._name = name

    def __len__(self) -> int:
        return self._records

    @property
    def shuffle_block(self) -> int | None:
        """None: any record is cheap."""
        return None

    def take(self, indices: Int64) -> Batch:
        """The records at `indices`, copied.

        Raises:
            BadInput: an index out of range.
        """
        rows = checked_indices(indices, self._records, self._name)

        def pick(array: Array) -> Array:
            picked = np.asarray(array[rows])
            return picked.astype(np.float32, copy=False) if picked.dtype.kind == "f" else picked

        return tuple(map_arrays(pick, part) for part in self._parts)
