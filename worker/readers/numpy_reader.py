"""Records in NumPy arrays, in memory or memory-mapped."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.records.pytrees import (
    Leaf,
    batch_arrays,
    map_arrays,
    named_parts,
    records_of,
    refuse_large_ids,
)
from elastable.worker.readers.records.ragged import taken
from elastable.worker.readers.records.reader import Batch, Reader, checked_indices

__all__ = ["NumpyReader"]


class NumpyReader(Reader):
    """Arrays whose first axis is the records.

    Args:
        x: Features: an array, or a pytree of arrays. Anything with `__array__` works (a memory-mapped .npy file, a
            pandas Series, a tensor). Records of different lengths: an object array of lists or arrays, a RaggedArray, a
            `tf.RaggedTensor`; sparse ones: a `tf.SparseTensor` or a SciPy sparse matrix. Neither is ever padded.
        y: Targets, likewise; None: batches are `(x,)`.
        sample_weight: Weights, likewise.
        name: What errors call this source.

    Raises:
        BadInput: no records, different lengths, or leaves that are not arrays.
    """

    def __init__(self, x: object, y: object = None, sample_weight: object = None, *, name: str = "arrays") -> None:
        if sample_weight is not None and y is None:
            raise BadInput(f"{name}: sample_weight without y; weights belong to targets")
        self._parts: Batch = batch_arrays([x, *(part for part in (y, sample_weight) if part is not None)])
        self._records = records_of(named_parts(self._parts), name)
        self._name = name

    def __len__(self) -> int:
        return self._records

    @property
    def shuffle_block(self) -> int | None:
        return None

    def take(self, indices: Int64) -> Batch:
        rows = checked_indices(indices, self._records, self._name)

        def pick(leaf: Leaf) -> Leaf:
            picked = taken(leaf, rows)
            if not isinstance(leaf, np.memmap) or not isinstance(picked, np.ndarray):
                return picked
            return refuse_large_ids(picked, self._name)

        return tuple(map_arrays(pick, part) for part in self._parts)
