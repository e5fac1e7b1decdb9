"""The inputs of `fit`, `evaluate` and `predict` as readers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import BadInput
from elastable.worker.readers import Batch, NumpyReader, Reader, as_reader
from elastable.worker.readers.records.reader import ModelInputs, checked_indices

__all__ = ["reader_of", "require_batch_size", "split_off"]


class _Range(Reader):
    """The records first .. last - 1 of another reader."""

    def __init__(self, reader: Reader, first: int, last: int) -> None:
        self._reader, self._first, self._last = reader, first, last

    def __len__(self) -> int:
        return self._last - self._first

    @property
    def shuffle_block(self) -> int | None:
        return self._reader.shuffle_block

    def for_inputs(self, inputs: ModelInputs) -> Reader:
        return _Range(self._reader.for_inputs(inputs), self._first, self._last)

    def take(self, indices: Int64) -> Batch:
        return self._reader.take(checked_indices(indices, len(self), "validation_split") + self._first)


def reader_of(x: object, y: object = None, sample_weight: object = None) -> Reader:
    """Arrays as Keras takes them, or whatever `as_reader` takes, as a reader.

    Raises:
        BadInput: it is neither.
    """
    if isinstance(x, Reader | tuple | Mapping) and y is None and sample_weight is None:
        return as_reader(x)
    return NumpyReader(x, y, sample_weight)


def split_off(reader: Reader, validation_split: float) -> tuple[Reader, Reader | None]:
    """(training records, validation records): the last fraction `validation_split` is for validation, as in Keras.

    Raises:
        BadInput: the split leaves the training or the validation records empty.
    """
    if validation_split == 0:
        return reader, None
    records = len(reader)
    first = math.floor(records * (1 - validation_split))
    if not 0 < first < records:
        raise BadInput(
            f"validation_split={validation_split} of {records} records leaves the training or the validation split "
            "empty"
        )
    return _Range(reader, 0, first), _Range(reader, first, records)


def require_batch_size(batch_size: object) -> int:
    """The batch size as an int.

    Raises:
        BadInput: not an integer of at least 1.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1:
        raise BadInput(f"batch_size={batch_size!r}: give the records of a whole batch, over all replicas; 1 or more")
    return int(batch_size)
