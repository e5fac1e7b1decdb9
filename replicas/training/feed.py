"""The inputs of `fit`, `evaluate` and `predict`, and which of their records a replica takes of every global batch."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import keras
import numpy as np

from elastable.embedding_store.errors import BadInput
from elastable.master.tasks.record_order import record_order
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.training.sharded_variables import VariableSplit
from elastable.worker.keras.structures import TensorBatch
from elastable.worker.readers.batch.reader import Reader
from elastable.worker.readers.numpy_reader import NumpyReader, as_reader
from elastable.worker.readers.pass_reader import PartReader
from elastable.worker.user_model.build import as_tensors


@dataclass(frozen=True, slots=True)
class BatchPart:
    """A replica's part of a global batch.

    Attributes:
        batch: Its records as tensors; None: this replica has none.
        shares: By rank: its records / the records of the whole batch.
    """

    batch: TensorBatch | None
    shares: tuple[float, ...]


class Feed:
    """This replica's part of the global batches, which are the same on every replica.

    A batch is a slice of the epoch's seeded order; its records are split over
    the replicas in that order, evenly, the longer parts first.

    Args:
        reader: The same records on every replica.
        batch_size: Records of a global batch; the last of an epoch may have fewer.
        shuffle: False: records keep their order.
        collective_layer: The name of a layer that all replicas call together,
            so that none may be without records; "": there is none.
        model: The model that takes the records; None: any.

    Raises:
        BadInput: a batch size below 1, or one that leaves a replica without records that it needs.
    """

    def __init__(
        self,
        reader: Reader,
        batch_size: int,
        group: ReplicaGroup,
        seed: int = 0,
        shuffle: bool = False,
        collective_layer: str = "",
        model: keras.Model | None = None,
    ) -> None:
        batch_size = require_batch_size(batch_size)
        fewest = min(batch_size, len(reader) % batch_size or batch_size)
        if collective_layer and fewest < group.size:
            raise BadInput(
                f"batches of {batch_size} of {len(reader)} records: one has {fewest} for {group.size} replicas, and "
                f"every replica needs records, as all look up together in {collective_layer!r}; choose another "
                "batch_size"
            )
        self._reader, self._batch_size, self._group = reader, batch_size, group
        self._seed, self._shuffle, self._model = seed, shuffle, model

    @property
    def steps(self) -> int:
        """Batches of an epoch."""
        return -(-len(self._reader) // self._batch_size)

    def parts(self, epoch: int = 0) -> Iterator[BatchPart]:
        """This replica's part of every batch of an epoch, counted from 0."""
        records = len(self._reader)
        order = record_order(records, epoch, self._seed, self._shuffle, self._reader.shuffle_block)
        for first in range(0, records, self._batch_size):
            last = min(first + self._batch_size, records)
            split = VariableSplit(last - first, self._group.size)
            bounds = [split.bounds(rank) for rank in range(self._group.size)]
            begin, end = bounds[self._group.rank]
            batch = None
            if end > begin:
                rows = order.take(first + begin, first + end)
                batch = as_tensors(self._reader.take(rows), f"{type(self._reader).__name__}.take()", self._model, rows)
            yield BatchPart(batch, tuple((stop - start) / (last - first) for start, stop in bounds))


def reader_of(x: object, y: object = None, sample_weight: object = None) -> Reader:
    """Arrays as Keras takes them, or whatever `as_reader` takes, as a reader."""
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
    return PartReader(reader, 0, first), PartReader(reader, first, records)


def require_batch_size(batch_size: object) -> int:
    """The batch size as an int.

    Raises:
        BadInput: not an integer of at least 1.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1:
        raise BadInput(f"batch_size={batch_size!r}: give the records of a whole batch, over all replicas; 1 or more")
    return int(batch_size)
