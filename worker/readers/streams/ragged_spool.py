"""Spools of ragged and sparse records: the length of each, and the elements of all."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from elastable.embedding_store.contract.arrays import Array, Int64
from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.records.ragged import Leaf, RaggedArray, SparseArray, ranges, splits_of
from elastable.worker.readers.streams.spool import Spool

__all__ = ["AnySpool", "spool_for"]


class AnySpool(Protocol):
    """A `Spool` of records of any kind."""

    def append(self, part: Leaf) -> None:
        """Appends records."""

    def finish(self, records: int) -> None:
        """Ends writing; makes `take` possible."""

    def close(self) -> None:
        """Closes the files."""

    def take(self, rows: Int64) -> Leaf:
        """Copies of the records at `rows`."""


def spool_for(name: str, folder: Path, first: Leaf) -> AnySpool:
    """An empty spool for records like those of `first`.

    Raises:
        BadInput: nothing can be written in `folder`.
    """
    if isinstance(first, RaggedArray):
        return _RaggedSpool(name, folder, first)
    if isinstance(first, SparseArray):
        return _SparseSpool(name, folder, first)
    return _DenseSpool(name, folder, first)


class _DenseSpool(Spool):
    def append(self, part: Leaf) -> None:
        if not isinstance(part, np.ndarray):
            raise BadInput(f"{self._name} is a {type(part).__name__}, and was an array before; make all batches alike")
        super().append(part)


class _ListSpool:
    """Records that are lists: how long each is, and spools of the elements of all."""

    def __init__(self, name: str, folder: Path, *elements: AnySpool) -> None:
        self._name, self._elements = name, elements
        self._lengths = _DenseSpool(name, folder, np.empty(0, np.int64))
        self._splits: Int64 = np.zeros(1, np.int64)

    def finish(self, records: int) -> None:
        self._lengths.finish(records)
        self._splits = splits_of(self._lengths.take(np.arange(records, dtype=np.int64)))
        for spool in self._elements:
            spool.finish(int(self._splits[-1]))

    def close(self) -> None:
        for spool in (self._lengths, *self._elements):
            spool.close()

    def _append(self, splits: Int64, *elements: Array | RaggedArray) -> None:
        for spool, part in zip(self._elements, elements, strict=True):
            spool.append(part)
        self._lengths.append(np.diff(splits))

    def _take(self, rows: Int64) -> tuple[Int64, list[Leaf]]:
        """The lengths of the records, and their elements from each spool."""
        starts = self._splits[rows]
        lengths = self._splits[rows + 1] - starts
        positions = ranges(starts, lengths)
        return lengths, [spool.take(positions) for spool in self._elements]


class _RaggedSpool(_ListSpool):
    def __init__(self, name: str, folder: Path, first: RaggedArray) -> None:
        super().__init__(name, folder, spool_for(name, folder, first.values))

    def append(self, part: Leaf) -> None:
        if not isinstance(part, RaggedArray):
            raise BadInput(f"{self._name} is a {type(part).__name__}, and was ragged before; make all batches alike")
        self._append(part.splits, part.values)

    def take(self, rows: Int64) -> RaggedArray:
        lengths, (values,) = self._take(rows)
        assert not isinstance(values, SparseArray)
        return RaggedArray.of_lengths(values, lengths)


class _SparseSpool(_ListSpool):
    def __init__(self, name: str, folder: Path, first: SparseArray) -> None:
        self._shape = first.shape
        super().__init__(
            name, folder, _DenseSpool(name, folder, first.indices), _DenseSpool(name, folder, first.values)
        )

    def append(self, part: Leaf) -> None:
        if not isinstance(part, SparseArray) or len(part.shape) != len(self._shape):
            raise BadInput(
                f"{self._name} is a {type(part).__name__}, and was sparse of {len(self._shape) + 1} axes before; "
                "make all batches alike"
            )
        # Batches made of ragged ones are as wide as their longest record.
        self._shape = tuple(map(max, self._shape, part.shape))
        self._append(part.splits, part.indices, part.values)

    def take(self, rows: Int64) -> SparseArray:
        lengths, (indices, values) = self._take(rows)
        assert isinstance(indices, np.ndarray)
        assert isinstance(values, np.ndarray)
        return SparseArray(indices, values, splits_of(lengths), self._shape)
