"""Pytrees of arrays: dicts, tuples and lists whose leaves are NumPy, ragged or sparse arrays. No TensorFlow here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias, TypeVar, cast

import numpy as np

from elastable.embedding_store.contract.arrays import Array, Int64
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.tables.checks import as_ids, refuse_masked
from elastable.worker.readers.batch.ragged import (
    Leaf,
    RaggedArray,
    SparseArray,
    concatenated,
    map_values,
    splits_of,
    taken,
)

T = TypeVar("T")
U = TypeVar("U")
Structure: TypeAlias = "T | Mapping[str, Structure[T]] | Sequence[Structure[T]]"
"""A pytree: values in dicts, tuples and lists of any depth."""

_PARTS = ("x", "y", "sample_weight")
_KINDS_KEPT = "biufSU"
_LARGEST_ID = np.uint64(2**63 - 1)


def as_arrays(tree: object, name: str) -> Structure[Leaf]:
    """The same pytree with every leaf a NumPy array of at least one axis, a RaggedArray or a SparseArray.

    Floats keep their dtype, because they may be ids; they become float32 once the model that takes them is known
    (`elastable.worker.user_model.build.as_tensors`). A memory-mapped array stays mapped. Object arrays of lists or
    arrays, and ragged tensors, become ragged; sparse tensors and SciPy sparse matrices become sparse.

    Args:
        tree: Arrays, or pytrees of them.
        name: What errors call it, such as "x".

    Raises:
        BadInput: a leaf that is not an array of numbers or strings, integers above 2**63 - 1, an empty container, a key
            that is not a string.
    """
    children: dict[str, Structure[Leaf]] | list[Structure[Leaf]]
    if isinstance(tree, Mapping):
        for key in tree:
            if not isinstance(key, str):
                raise BadInput(f"{name}: key {key!r} is a {type(key).__name__}; names of features are strings")
        children = {key: as_arrays(value, f"{name}[{key!r}]") for key, value in tree.items()}
    elif isinstance(tree, tuple | list):
        if tree and isinstance(tree[0], int | float | str | bytes):
            raise BadInput(f"{name}: a {type(tree).__name__} of {type(tree[0]).__name__}; make it a NumPy array")
        children = [as_arrays(value, f"{name}[{place}]") for place, value in enumerate(tree)]
    else:
        return _as_array(tree, name)
    if not children:
        raise BadInput(f"{name}: an empty {type(tree).__name__}; it must hold at least one array")
    return tuple(children) if isinstance(tree, tuple) else children


def gathered(blocks: Int64, rows: Int64, read: Callable[[int], Structure[Leaf]], empty: int = 0) -> Structure[Leaf]:
    """Records that lie in several blocks, in the order asked for.

    Args:
        blocks: int64 `[n]`: the block of each record.
        rows: int64 `[n]`: its place there.
        read: Number of a block -> its records, a pytree; called once for each block, in ascending order.
        empty: The block that says the types of no records.
    """
    order = np.argsort(blocks, kind="stable")
    numbers, counts = np.unique(blocks, return_counts=True) if len(blocks) else (np.array([empty]), np.zeros(1, int))
    members = np.split(rows[order], np.cumsum(counts)[:-1])
    pieces = [
        map_arrays(partial(taken, rows=inside), read(int(number)))
        for number, inside in zip(numbers, members, strict=True)
    ]
    back = np.argsort(order, kind="stable")
    leaves = zip(*([leaf for _, leaf in named_arrays(piece, "")] for piece in pieces), strict=True)
    whole = iter([taken(concatenated(same), back) for same in leaves])
    return map_arrays(lambda _: next(whole), pieces[0])


def batch_arrays(parts: Sequence[object]) -> tuple[Structure[Leaf], ...]:
    """`as_arrays` of x, y and sample_weight."""
    return tuple(map(as_arrays, parts, _PARTS))


def map_arrays(function: Callable[[T], U], tree: Structure[T]) -> Structure[U]:
    """The pytree with `function` applied to each leaf."""
    if isinstance(tree, Mapping):
        return {key: map_arrays(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_arrays(function, value) for value in tree)
    if isinstance(tree, list):
        return [map_arrays(function, value) for value in tree]
    return function(cast("T", tree))


def named_arrays(tree: Structure[T], name: str) -> Iterator[tuple[str, T]]:
    """All leaves of a pytree, with names such as x['user'] or x[0]."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from named_arrays(value, f"{name}[{key!r}]")
    elif isinstance(tree, tuple | list):
        for place, value in enumerate(tree):
            yield from named_arrays(value, f"{name}[{place}]")
    else:
        yield name, cast("T", tree)


def named_parts(parts: Sequence[Structure[T]]) -> list[tuple[str, T]]:
    """All leaves of x, y and sample_weight, with names such as x['user'] or y."""
    found: list[tuple[str, T]] = []
    for part, name in zip(parts, _PARTS, strict=False):
        found += named_arrays(part, name)
    return found


def records_of(arrays: list[tuple[str, Leaf]], source: str) -> int:
    """The length of the first axis, the same in all arrays and at least 1.

    Raises:
        BadInput: lengths that differ (all are named), or no records.
    """
    lengths = {}
    for name, array in arrays:
        lengths[name] = len(array)
    if len(set(lengths.values())) > 1:
        message = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise BadInput(f"{source}: arrays must have one length, but {message} records")
    records = next(iter(lengths.values()))
    if records == 0:
        raise BadInput(f"{source}: empty, {next(iter(lengths))} has 0 records; there must be at least one")
    return records


def refuse_large_ids(array: Array, name: str) -> Array:
    """The array itself.

    Raises:
        BadInput: a uint64 above 2**63 - 1, by name and position.
    """
    if array.dtype == np.uint64 and array.size and array.max() > _LARGEST_ID:
        position = int(np.argmax(array.ravel() > _LARGEST_ID))
        raise BadInput(
            f"{name}: {array.ravel()[position]} at position {position} is above 2**63 - 1, the largest id; "
            "view the column as int64, or hash it (et.hash_ids)"
        )
    return array


def _as_array(value: object, name: str) -> Leaf:
    if isinstance(value, RaggedArray | SparseArray):
        return map_values(lambda values: _as_plain(values, name), value)
    found = _from_tensor(value)
    if found is None and getattr(value, "dtype", None) == np.dtype(object):
        found = _from_lists(np.asarray(value), name)
    if found is not None:
        return map_values(lambda values: _as_plain(values, name), found)
    if value is None:
        raise BadInput(
            f"{name} is None; leave it out, or give an array: of a target whose loss is None, any with as many records"
        )
    if not hasattr(value, "__array__"):
        raise BadInput(
            f"{name}: a {type(value).__name__} is no array; give NumPy arrays (object arrays of lists are ragged), "
            "ragged or sparse tensors, or dicts, tuples or lists of them"
        )
    refuse_masked(value, name)
    return _as_plain(value if isinstance(value, np.memmap) else np.asarray(value), name)


def _as_plain(array: Array, name: str) -> Array:
    if array.ndim == 0:
        raise BadInput(
            f"{name}: a single {array.dtype} value; the first axis must be the records (batch a tf.data.Dataset)"
        )
    if array.dtype.kind == "O":
        _refuse_objects(array, name)
    elif array.dtype.kind not in _KINDS_KEPT:
        raise BadInput(f"{name}: dtype {array.dtype}; use integers, floats, booleans or strings")
    if isinstance(array, np.memmap):
        return array  # read, checked and cast when records are taken from it
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        return array.astype(np.float64)
    return refuse_large_ids(array, name)


def _refuse_objects(array: Array, name: str) -> None:
    others = [(place, value) for place, value in enumerate(array.flat) if not isinstance(value, str | bytes)]
    for place, value in others:
        if str(value) in ("None", "nan", "<NA>", "NaT"):
            raise BadInput(f"{name}: an object array whose element {place} is {value}: put a value in its place")
    for place, value in others:
        raise BadInput(
            f"{name}: an object array whose element {place} is a {type(value).__name__}; "
            "objects must all be strings, or all be lists or arrays of one rank, which make ragged records; "
            'numbers are no objects: .astype("int64") or .astype("float32")'
        )


# Converts ragged and sparse values of other libraries, without importing them


_NESTED = (list, tuple, np.ndarray)


def _from_tensor(value: object) -> RaggedArray | SparseArray | None:
    """Converts a `tf.RaggedTensor`, a `tf.SparseTensor` or a SciPy sparse matrix; None: none of them."""
    if hasattr(value, "row_splits") and hasattr(value, "values"):
        inner = _from_tensor(value.values)
        values = inner if isinstance(inner, RaggedArray) else np.asarray(value.values)
        return RaggedArray(values, np.asarray(value.row_splits))
    if hasattr(value, "dense_shape") and hasattr(value, "indices") and hasattr(value, "values"):
        return _from_coordinates(np.asarray(value.indices), np.asarray(value.values), np.asarray(value.dense_shape))
    if hasattr(value, "tocoo") and hasattr(value, "nnz"):
        found = value.tocoo()
        return _from_coordinates(np.stack([found.row, found.col], axis=1), found.data, np.asarray(found.shape))
    return None


def _from_lists(array: Array, name: str) -> RaggedArray | None:
    """Converts an object array of lists, tuples or arrays, at any depth, to ragged records; None: of other values."""
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
    ragged = _from_lists(inner, name)
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


def _from_coordinates(indices: Array, values: Array, shape: Array) -> SparseArray:
    indices = indices.astype(np.int64, copy=False)
    order = np.lexsort(indices.T[::-1])
    records = np.bincount(indices[:, 0], minlength=int(shape[0]))
    return SparseArray(indices[order, 1:], values[order], splits_of(records), tuple(map(int, shape[1:])))
