"""Readers that wrap another reader: a part of its records, or class weights."""

from collections.abc import Mapping
from copy import copy

import numpy as np

from elastable.embedding_store.contract.arrays import Array, Float32, Int64
from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.records.reader import Batch, ModelInputs, Reader, checked_indices


class PartReader(Reader):
    """The records `start <= record < stop` of another reader.

    Raises:
        BadInput: the range is empty or exceeds the reader.
    """

    def __init__(self, reader: Reader, start: int, stop: int) -> None:
        if not 0 <= start < stop <= len(reader):
            raise BadInput(f"records {start} to {stop} of {len(reader)}: there are none, or not so many")
        self._reader, self._start, self._records = reader, start, stop - start
        self.shuffle_block = reader.shuffle_block

    def __len__(self) -> int:
        return self._records

    def for_inputs(self, inputs: ModelInputs) -> Reader:
        return PartReader(self._reader.for_inputs(inputs), self._start, self._start + self._records)

    def take(self, indices: Int64) -> Batch:
        return self._reader.take(checked_indices(indices, self._records, "part") + self._start)


class ClassWeightReader(Reader):
    """Records of another reader, weighted by the class of their target, as `model.fit(class_weight=)` does.

    Args:
        reader: Gives `(x, y)`; `y` is one array, of class numbers `[n]` or `[n, 1]`, or one-hot `[n, classes]`.
        class_weight: Class -> weight; the default weight is 1.

    Attributes:
        batch_records: Records of the other reader's batches; 0: it has none.

    Raises:
        BadInput: not a mapping of class numbers to weights, several targets, or a reader with sample weights.
    """

    def __init__(self, reader: Reader, class_weight: Mapping[int, float]) -> None:
        if not isinstance(class_weight, Mapping):
            raise BadInput(f"class_weight={class_weight!r}: give a dict, class number -> weight")
        try:
            self._weights = {int(number): float(weight) for number, weight in class_weight.items()}
        except (TypeError, ValueError) as error:
            raise BadInput(f"class_weight={class_weight!r}: give a dict, class number -> weight") from error
        self._reader = reader
        self.shuffle_block, self.in_order, self.batches = reader.shuffle_block, reader.in_order, reader.batches
        self.batch_records = int(getattr(reader, "batch_records", 0))
        _require_one_target(reader.take(np.zeros(1, np.int64)))

    def __len__(self) -> int:
        return len(self._reader)

    def batch(self, number: int) -> Batch:
        return self._weighted(self._reader.batch(number))

    def of_pass(self, number: int) -> Reader:
        return self._of(self._reader.of_pass(number))

    def for_inputs(self, inputs: ModelInputs) -> Reader:
        return self._of(self._reader.for_inputs(inputs))

    def _of(self, reader: Reader) -> Reader:
        if reader is self._reader:
            return self
        weighted = copy(self)
        weighted._reader = reader
        return weighted

    def take(self, indices: Int64) -> Batch:
        return self._weighted(self._reader.take(indices))

    def _weighted(self, batch: Batch) -> Batch:
        x, y = batch
        return x, y, self._weights_of(np.asarray(y))

    def _weights_of(self, y: Array) -> Float32:
        if y.ndim > 1:
            y = y[..., 0] if y.shape[-1] == 1 else np.argmax(y, axis=-1)
        classes, inverse = np.unique(np.round(y).astype(np.int32), return_inverse=True)
        weights = np.array([self._weights.get(int(number), 1.0) for number in classes], np.float32)
        return weights[inverse].reshape(y.shape)


def _require_one_target(batch: Batch) -> None:
    if len(batch) == 3:
        raise BadInput("class_weight and sample_weight: give one of them, as in model.fit")
    if len(batch) == 1:
        raise BadInput("class_weight: there are no targets y to have classes")
    if not hasattr(batch[1], "__array__"):
        raise BadInput("class_weight: y is several targets; weights by class are for models with a single output")
