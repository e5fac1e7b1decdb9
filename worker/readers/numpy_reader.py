"""Records in NumPy arrays, in memory or memory-mapped; any data as a Reader."""

from collections.abc import Mapping
from functools import partial

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.batch.pytrees import batch_arrays, map_arrays, named_parts, records_of, refuse_large_ids
from elastable.worker.readers.batch.ragged import Leaf, taken
from elastable.worker.readers.batch.reader import Batch, Reader, checked_indices
from elastable.worker.readers.stream_reader import is_stream


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
        parts = [x, y, sample_weight]
        while len(parts) > 1 and parts[-1] is None:
            parts.pop()
        self._parts: Batch = batch_arrays(parts)
        self._records = records_of(named_parts(self._parts), name)
        self._name = name

    def __len__(self) -> int:
        return self._records

    def take(self, indices: Int64) -> Batch:
        rows = checked_indices(indices, self._records, self._name)

        def pick(leaf: Leaf) -> Leaf:
            picked = taken(leaf, rows)
            if not isinstance(leaf, np.memmap) or not isinstance(picked, np.ndarray):
                return picked
            return refuse_large_ids(picked, self._name)

        return tuple(map(partial(map_arrays, pick), self._parts))


# The data of `et.fit`, or of a model file's `data()`, as a Reader


_RIGHT = "give a Reader, a tuple (x, y) or (x, y, sample_weight) of arrays, or a dict with the keys x, y, sample_weight"


def as_reader(data: object, endless: bool = False) -> Reader:
    """A Reader of `data`.

    Args:
        data: A Reader; a tuple (x,), (x, y) or (x, y, sample_weight); a dict with the key "x" and optionally "y" and
            "sample_weight". x, y and sample_weight are arrays or pytrees of them.
        endless: Whether a stream of events is allowed: for training data, not for validation data.

    Raises:
        BadInput: anything else; the message says what to pass. Streams too: only the user knows whether all processes
            see the same records.
    """
    if isinstance(data, Reader) and data.streams and not endless:
        raise BadInput(
            f"an {type(data).__name__} is for training alone, in et.fit and jobs; give et.StreamReader(stream, "
            "count=...), or records in files"
        )
    if isinstance(data, Reader):
        if len(data) == 0:
            raise BadInput(f"{type(data).__name__}: empty; there must be at least one record")
        return data
    if isinstance(data, Mapping):
        unknown = [key for key in data if key not in ("x", "y", "sample_weight")]
        if unknown or "x" not in data:
            raise BadInput(f"data is a dict with the keys {', '.join(map(repr, data)) or '(none)'}; {_RIGHT}")
        return NumpyReader(**data)
    if isinstance(data, tuple):
        if not 1 <= len(data) <= 3:
            raise BadInput(f"data is a tuple of {len(data)}; {_RIGHT}")
        return NumpyReader(*data)
    raise BadInput(f"data is a {_kind(data)}; {_RIGHT}")


def _kind(data: object) -> str:
    if is_stream(data):
        return (f"{type(data).__name__}, a stream, and a job's seeded order fetches records by number: wrap it in "
                "et.StreamReader, which reads it once (of one without an end, count= batches)")  # fmt: skip
    if hasattr(data, "__array__"):
        return f"{type(data).__name__} alone"
    return type(data).__name__
