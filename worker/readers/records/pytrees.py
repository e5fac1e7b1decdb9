"""Pytrees of arrays: dicts, tuples and lists whose leaves are NumPy, ragged or sparse arrays. No TensorFlow here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar, cast

import numpy as np

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.rows.checks import refuse_masked
from elastable.worker.readers.records.ragged import Leaf, RaggedArray, SparseArray, map_values
from elastable.worker.readers.records.tensors import from_lists, from_tensor

__all__ = [
    "Array",
    "Leaf",
    "Structure",
    "as_arrays",
    "batch_arrays",
    "map_arrays",
    "named_arrays",
    "named_parts",
    "records_of",
    "refuse_large_ids",
]

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
    (`elastable.worker.models.build.as_tensors`). A memory-mapped array stays mapped. Object arrays of lists or arrays,
    and ragged tensors, become ragged; sparse tensors and SciPy sparse matrices become sparse.

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


def batch_arrays(parts: Sequence[object]) -> tuple[Structure[Leaf], ...]:
    """`as_arrays` of x, y and sample_weight."""
    return tuple(as_arrays(part, name) for part, name in zip(parts, _PARTS, strict=False))


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
    return [leaf for part, name in zip(parts, _PARTS, strict=False) for leaf in named_arrays(part, name)]


def records_of(arrays: list[tuple[str, Leaf]], source: str) -> int:
    """The length of the first axis, the same in all arrays and at least 1.

    Raises:
        BadInput: lengths that differ (all are named), or no records.
    """
    lengths = {name: len(array) for name, array in arrays}
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
    found = from_tensor(value)
    if found is None and getattr(value, "dtype", None) == np.dtype(object):
        found = from_lists(np.asarray(value), name)
    if found is not None:
        return map_values(lambda values: _as_plain(values, name), found)
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
    for place, value in enumerate(array.flat):
        if not isinstance(value, str | bytes):
            raise BadInput(
                f"{name}: an object array whose element {place} is a {type(value).__name__}; "
                "objects must all be strings, or all be lists or arrays of one rank, which make ragged records"
            )
