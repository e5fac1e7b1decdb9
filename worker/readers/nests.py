"""Dict, tuple and list nests of arrays, without TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.errors import BadInput

__all__ = ["Array", "as_arrays", "map_arrays", "named_arrays", "records_of"]

Array = npt.NDArray[Any]

_KINDS_KEPT = "biufSU"


def as_arrays(nest: Any, name: str) -> Any:
    """The same nest with every leaf a NumPy array of at least one axis.

    Floats of other widths become float32, as in `model.fit`; a memory-mapped
    array stays one, and is cast where it is taken from.

    Args:
        nest: Arrays, or dict/tuple/list nests of them.
        name: What to call it in an error, such as "x".

    Raises:
        BadInput: a leaf that is no array of numbers or strings, an empty nest,
            a key that is no string.
    """
    if isinstance(nest, Mapping):
        for key in nest:
            if not isinstance(key, str):
                raise BadInput(f"{name}: key {key!r} is a {type(key).__name__}; names of features are strings")
        children: Any = {key: as_arrays(value, f"{name}[{key!r}]") for key, value in nest.items()}
    elif isinstance(nest, tuple | list):
        if nest and isinstance(nest[0], int | float | str | bytes):
            raise BadInput(f"{name}: a {type(nest).__name__} of {type(nest[0]).__name__}; make it a NumPy array")
        parts = [as_arrays(value, f"{name}[{place}]") for place, value in enumerate(nest)]
        children = tuple(parts) if isinstance(nest, tuple) else parts
    else:
        return _as_array(nest, name)
    if not children:
        raise BadInput(f"{name}: an empty {type(nest).__name__}; it must hold at least one array")
    return children


def map_arrays(function: Callable[[Array], Array], nest: Any) -> Any:
    """The nest with `function` applied to each array."""
    if isinstance(nest, Mapping):
        return {key: map_arrays(function, value) for key, value in nest.items()}
    if isinstance(nest, tuple):
        return tuple(map_arrays(function, value) for value in nest)
    if isinstance(nest, list):
        return [map_arrays(function, value) for value in nest]
    return function(nest)


def named_arrays(nest: Any, name: str) -> Iterator[tuple[str, Array]]:
    """All arrays of a nest, with names such as x['user'] or x[0]."""
    if isinstance(nest, Mapping):
        for key, value in nest.items():
            yield from named_arrays(value, f"{name}[{key!r}]")
    elif isinstance(nest, tuple | list):
        for place, value in enumerate(nest):
            yield from named_arrays(value, f"{name}[{place}]")
    else:
        yield name, nest


def records_of(arrays: list[tuple[str, Array]], source: str) -> int:
    """The length of the first axis, the same in all arrays and at least 1.

    Raises:
        BadInput: lengths that differ (all are named), or no records.
    """
    lengths = {name: len(array) for name, array in arrays}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise BadInput(f"{source}: arrays must have one length, but {told} records")
    records = next(iter(lengths.values()))
    if records == 0:
        raise BadInput(f"{source}: empty, {next(iter(lengths))} has 0 records; there must be at least one")
    return records


def _as_array(value: Any, name: str) -> Array:
    if not hasattr(value, "__array__"):
        raise BadInput(
            f"{name}: a {type(value).__name__} is no array; give NumPy arrays, or dicts, tuples or lists of them "
            "(for ragged or sparse values write a Reader whose take() returns the tensors)"
        )
    array: Array = value if isinstance(value, np.memmap) else np.asarray(value)
    if array.ndim == 0:
        raise BadInput(f"{name}: a single {array.dtype} value; the first axis must be the records")
    if array.dtype.kind == "O":
        _refuse_objects(array, name)
    elif array.dtype.kind not in _KINDS_KEPT:
        raise BadInput(f"{name}: dtype {array.dtype}; use integers, floats, booleans or strings")
    if array.dtype.kind == "f" and array.dtype != np.float32 and not isinstance(array, np.memmap):
        return array.astype(np.float32)
    return array


def _refuse_objects(array: Array, name: str) -> None:
    for place, value in enumerate(array.flat):
        if not isinstance(value, str | bytes):
            raise BadInput(
                f"{name}: an object array whose element {place} is a {type(value).__name__}; "
                "objects must be strings, and lists of one length make an array of numbers"
            )
