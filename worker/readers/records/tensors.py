"""Converts ragged and sparse values of other libraries, without importing them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.rows.checks import as_ids
from elastable.worker.readers.records.ragged import RaggedArray, SparseArray, splits_of

__all__ = ["from_lists", "from_tensor"]

_NESTED = (list, tuple, np.ndarray)


def from_tensor(value: object) -> RaggedArray | SparseArray | None:
    """Converts a `tf.RaggedTensor`, a `tf.SparseTensor` or a SciPy sparse matrix; None: none of them."""
    if hasattr(value, "row_splits") and hasattr(value, "values"):
        return _from_ragged(value.values, value.row_splits)
    if hasattr(value, "dense_shape") and hasattr(value, "indices") and hasattr(value, "values"):
        return _from_coordinates(np.asarray(value.indices), np.asarray(value.values), np.asarray(value.dense_shape))
    if hasattr(value, "tocoo") and hasattr(value, "nnz"):
        found = value.tocoo()
        return _from_coordinates(np.stack([found.row, found.col], axis=1), found.data, np.asarray(found.shape))
    return None


def from_lists(array: Array, name: str) -> RaggedArray | None:
    """Converts an object array of lists, tuples or arrays, at any depth, to ragged records; None: of other values.

    Raises:
        BadInput: lists mixed with other values, or of different depths.
    """
    if array.ndim != 1 or array.size == 0 or not isinstance(array[0], _NESTED):
        return None
    for place, record in enumerate(array):
        if not isinstance(record, _NESTED):
            raise BadInput(f"{name}: record {place} is a {type(record).__name__}, and record 0 a list; make all lists")
    lengths = np.array([len(record) for record in array], np.int64)
    return RaggedArray.of_lengths(_joined(list(array), name), lengths)


def _joined(records: list[Sequence[object] | Array], name: str) -> Array | RaggedArray:
    """The elements of all records, one after another: an array, or ragged if they are lists."""
    arrays = [record for record in records if isinstance(record, np.ndarray) and record.dtype != object]
    if len(arrays) == len(records):
        # The dtype of an empty array says nothing: it must not turn ids into floats.
        parts = [array for array in arrays if len(array)] or arrays[:1]
        if len({part.ndim for part in parts}) > 1:
            raise BadInput(f"{name}: records are arrays of {parts[0].ndim} axes and of others; make them of one rank")
        if all(part.dtype.kind in "iu" for part in parts):
            parts = [as_ids(part, name) for part in parts] if len({part.dtype for part in parts}) > 1 else parts
        try:
            return np.concatenate(parts)
        except ValueError as error:
            raise BadInput(f"{name}: records are arrays that differ behind their first axis: {error}") from error
    elements = [element for record in records for element in record]
    if not any(isinstance(element, _NESTED) for element in elements):
        return _as_one_array(elements, name)
    inner = np.empty(len(elements), object)
    inner[:] = elements
    ragged = from_lists(inner, name)
    if ragged is None:
        raise BadInput(f"{name}: records hold both lists and single values; make them lists of one depth")
    return ragged


def _as_one_array(elements: list[object], name: str) -> Array:
    if any(isinstance(element, str | bytes) for element in elements):
        return np.array(elements, object)
    if elements and all(isinstance(element, int | np.integer) for element in elements):
        try:
            return np.array(elements, np.int64)  # NumPy's default may be a float
        except OverflowError as error:
            raise BadInput(f"{name}: an integer beyond int64: {error}") from error
    return np.array(elements) if elements else np.empty(0, np.float32)


def _from_ragged(values: object, splits: npt.ArrayLike) -> RaggedArray:
    inner = from_tensor(values)
    return RaggedArray(inner if isinstance(inner, RaggedArray) else np.asarray(values), np.asarray(splits))


def _from_coordinates(indices: Array, values: Array, shape: Array) -> SparseArray:
    indices = indices.astype(np.int64, copy=False)
    order = np.lexsort(indices.T[::-1])
    records = np.bincount(indices[:, 0], minlength=int(shape[0]))
    return SparseArray(indices[order, 1:], values[order], splits_of(records), tuple(map(int, shape[1:])))
