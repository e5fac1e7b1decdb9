"""Spools of ragged and sparse records: how long each is, beside the elements of all."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.records.ragged import Leaf, RaggedArray, SparseArray, ranges
from elastable.worker.readers.records.reader import Int64
from elastable.worker.readers.streams.spool import Spool

__all__ = ["AnySpool", "spool_for"]


class AnySpool(Protocol):
    """What `Spool` is, whatever the records are; see there."""

    def append(self, part: Leaf) -> None:
        """Takes over more records."""

    def finish(self, records: int) -> None:
        """Nothing more will come."""

    def close(self) -> None:
        """Closes the files."""

    def take(self, rows: Int64) -> Leaf:
        """Copies of the records at `rows`."""


def spool_for(name: str, folder: Path, first: Leaf) -> AnySpool:
    """A spool for records such as those of `first`, any part of them; it is yet to be appended.

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


class _RaggedSpool:
    def __init__(self, name: str, folder: Path, first: RaggedArray) -> None:
        self._name = name
        self._lengths = Spool(name, folder, np.empty(0, np.int64))
        self._values = spool_for(name, folder, first.values)
        self._starts: Int64 = np.zeros(1, np.int64)

    def append(self, part: Leaf) -> None:
        if not isinstance(part, RaggedArray):
            raise BadInput(f"{self._name} is a {type(part).__name__}, and was ragged before; make all batches alike")
        self._values.append(part.values)
        self._lengths.append(np.diff(part.splits))

    def finish(self, records: int) -> None:
        self._lengths.finish(records)
        self._starts = _starts(self._lengths, records)
        self._values.finish(int(self._starts[-1]))

    def close(self) -> None:
        self._lengths.close()
        self._values.close()

    def take(self, rows: Int64) -> RaggedArray:
        starts = self._starts[rows]
        lengths = self._starts[rows + 1] - starts
        values = self._values.take(ranges(starts, lengths))
        assert not isinstance(values, SparseArray)
        return RaggedArray.of_lengths(values, lengths)


class _SparseSpool:
    def __init__(self, name: str, folder: Path, first: SparseArray) -> None:
        self._name = name
        self._shape = first.shape
        self._lengths = Spool(name, folder, np.empty(0, np.int64))
        self._indices = Spool(name, folder, first.indices)
        self._values = Spool(name, folder, first.values)
        self._starts: Int64 = np.zeros(1, np.int64)

    def append(self, part: Leaf) -> None:
        if not isinstance(part, SparseArray) or len(part.shape) != len(self._shape):
            raise BadInput(
                f"{self._name} is a {type(part).__name__}, and was sparse of {len(self._shape) + 1} axes before; "
                "make all batches alike"
            )
        # Batches made of ragged ones are as wide as their longest record.
        self._shape = tuple(map(max, self._shape, part.shape))
        self._values.append(part.values)
        self._indices.append(part.indices)
        self._lengths.append(np.diff(part.splits))

    def finish(self, records: int) -> None:
        self._lengths.finish(records)
        self._starts = _starts(self._lengths, records)
        self._values.finish(int(self._starts[-1]))
        self._indices.finish(int(self._starts[-1]))

    def close(self) -> None:
        for spool in (self._lengths, self._indices, self._values):
            spool.close()

    def take(self, rows: Int64) -> SparseArray:
        starts = self._starts[rows]
        lengths = self._starts[rows + 1] - starts
        elements = ranges(starts, lengths)
        splits = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        return SparseArray(self._indices.take(elements), self._values.take(elements), splits, self._shape)


def _starts(lengths: Spool, records: int) -> Int64:
    found = lengths.take(np.arange(records, dtype=np.int64))
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(found, dtype=np.int64)])
