"""Reads a stream of batches once, so that any of its records can be fetched afterwards."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard, cast

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.records.pytrees import Leaf, batch_arrays, map_arrays, named_parts, records_of
from elastable.worker.readers.records.reader import Batch, Reader, checked_indices
from elastable.worker.readers.streams.ragged_spool import AnySpool, spool_for

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

__all__ = [
    "StreamReader",
    "batch_parts",
    "batches_of",
    "is_dataset",
    "is_endless",
    "is_iterator",
    "is_py_dataset",
    "is_stream",
]

_STREAMS = frozenset({"tensorflow.DatasetV2", "keras.PyDataset", "torch.DataLoader"})
_INFINITE, _UNKNOWN = -1, -2  # tf.data.INFINITE_CARDINALITY, UNKNOWN_CARDINALITY


class StreamReader(Reader):
    """The records of a stream of batches.

    A stream is a batched `tf.data.Dataset` (of TFRecord files, say), a `keras.utils.PyDataset`, a torch `DataLoader`,
    or any iterable of batches.

    A job fetches records by number, in its own order. So the stream is read to its end when the reader is created, a
    batch at a time, into files that take the room of the records as arrays and are removed with the process. Every
    epoch has the same records: random augmentation and shuffling of the stream happen once. The job shuffles.

    In a model file every process creates a reader, and all must see the same records in the same order: do not shuffle
    the stream, or seed the shuffle.

    Args:
        batches: Batches are x, (x,), (x, y) or (x, y, sample_weight): arrays, or pytrees of arrays, whose first axis is
            the records. Ragged and sparse tensors stay what they are; nothing is padded.
        count: The most batches to read, needed for an endless stream; None: all.
        folder: Folder of the files; None: the system's folder for temporary files.
        shuffle_block: As of `Reader`. None is right if the files fit into the system's free memory.

    Attributes:
        batch_records: Records of the first batch.
        sizes: Records of each batch.

    Raises:
        BadInput: not a stream, an endless or empty one, batches of different structures, shapes or dtypes, or no room
            in `folder`; names the batch, counted from 0.
    """

    def __init__(
        self,
        batches: object,
        *,
        count: int | None = None,
        folder: str | Path | None = None,
        shuffle_block: int | None = None,
    ) -> None:
        if count is not None and count < 1:
            raise BadInput(f"count={count}: take at least one batch, or None for all")
        if shuffle_block is not None and shuffle_block < 1:
            raise BadInput(f"shuffle_block={shuffle_block}: records in a range, at least 1, or None")
        self._name = type(batches).__name__
        self._shuffle_block = shuffle_block
        self._records = self.batch_records = 0
        self.sizes: list[int] = []
        place = Path(tempfile.gettempdir() if folder is None else folder)
        self._spools: dict[str, AnySpool] = {}
        self._like: Batch = ()
        try:
            for number, batch in enumerate(islice(self._opened(batches, count), count)):
                before = self._records
                try:
                    self._append(batch, place)
                except BadInput as error:
                    raise type(error)(f"{self._name}: batch {number}: {error}") from error
                self.sizes.append(self._records - before)
            if not self._spools:
                raise BadInput(f"{self._name}: the stream ended before its first batch; it must hold a record")
            for spool in self._spools.values():
                spool.finish(self._records)
        finally:
            for spool in self._spools.values():
                spool.close()

    def __len__(self) -> int:
        return self._records

    @property
    def shuffle_block(self) -> int | None:
        return self._shuffle_block

    def take(self, indices: Int64) -> Batch:
        rows = checked_indices(indices, self._records, self._name)
        taken = (spool.take(rows) for spool in self._spools.values())
        return tuple(map_arrays(lambda _: next(taken), part) for part in self._like)

    def _opened(self, batches: object, count: int | None) -> Iterator[object]:
        """The batches to read."""
        return batches_of(batches, count)

    def _append(self, batch: object, folder: Path) -> None:
        parts = batch_arrays(batch_parts(batch))
        leaves: list[tuple[str, Leaf]] = named_parts(parts)
        size = records_of(leaves, "arrays")
        if not self._spools:
            self.batch_records = size
            self._like = tuple(map_arrays(lambda _: None, part) for part in parts)
            for name, array in leaves:
                self._spools[name] = spool_for(name, folder, array)
        found = dict(leaves)
        if found.keys() != self._spools.keys():
            raise BadInput(f"it holds {', '.join(found)}, and the batches before held {', '.join(self._spools)}")
        for name, spool in self._spools.items():
            spool.append(found[name])
        self._records += size


def is_stream(data: object) -> bool:
    """Whether `data` is a stream of a known library."""
    return bool(_STREAMS & _kinds_of(data))


def is_iterator(data: object) -> bool:
    """Whether `data` is an iterator, such as a generator: it can be read only once, and may be endless."""
    return hasattr(data, "__next__")


def is_endless(data: object) -> bool | None:
    """Whether a stream has no end; None: unknown before it is read."""
    if is_dataset(data):
        cardinality = int(data.cardinality())
        return None if cardinality == _UNKNOWN else cardinality == _INFINITE
    if is_py_dataset(data):
        return data.num_batches is None
    try:
        len(cast("Sized", data))
    except TypeError:
        return None
    return False


def is_dataset(data: object) -> TypeGuard[tf.data.Dataset]:
    """Whether it is a `tf.data.Dataset`."""
    return "tensorflow.DatasetV2" in _kinds_of(data)


def is_py_dataset(data: object) -> TypeGuard[keras.utils.PyDataset]:
    """Whether it is a `keras.utils.PyDataset`."""
    return "keras.PyDataset" in _kinds_of(data)


def _kinds_of(data: object) -> set[str]:
    """`package.Class` of its class and all base classes, without importing the packages."""
    return {f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(data).__mro__}


def batches_of(data: object, count: int | None, endless: bool = False) -> Iterator[object]:
    """The batches of a stream, at most `count` of an endless one.

    Args:
        data: A stream, as for `StreamReader`.
        count: As of `StreamReader`.
        endless: Whether an endless stream is allowed: the caller knows when to stop.

    Raises:
        BadInput: not a stream, or an endless one without `count`.
    """
    message = (
        f"{type(data).__name__}: the stream has no end; say how many of its batches to take (count=), or where an "
        "epoch ends (et.EndlessReader(stream, steps_per_epoch))"
    )
    if is_dataset(data):
        if count is None and not endless and int(data.cardinality()) == _INFINITE:
            raise BadInput(message)
        opened: Iterator[object] = iter(data)
        return opened
    if is_py_dataset(data):
        batches = count if data.num_batches is None else int(data.num_batches)
        if batches is None and not endless:
            raise BadInput(message)
        # Its own iterator continues until an IndexError.
        return (data[number] for number in (range(batches) if batches is not None else itertools.count()))
    if not isinstance(data, Iterable) or isinstance(data, str | bytes | np.ndarray | dict):
        raise BadInput(f"{type(data).__name__}: no stream of batches; give a tf.data.Dataset, a keras.utils.PyDataset, "
                       "a torch DataLoader or an iterable of (x, y)")  # fmt: skip
    return iter(data)


def batch_parts(batch: object) -> tuple[object, ...]:
    """(x,), (x, y) or (x, y, sample_weight), as in `keras.utils.unpack_x_y_sample_weight`."""
    parts = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    while len(parts) > 1 and parts[-1] is None:
        parts = parts[:-1]
    if not 1 <= len(parts) <= 3:
        raise BadInput(f"a tuple of {len(parts)}; batches are x, (x, y) or (x, y, sample_weight)")
    return parts
