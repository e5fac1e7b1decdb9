"""Slices of dense variables in the header and body of a message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadGradient, BadInput
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.messages.frames import BodyPlan

__all__ = ["DenseEntries", "declare_dense", "dtype_of", "plan_dense", "taken_dense"]

DenseEntries = RepeatedCompositeFieldContainer[store_pb2.DenseSlice]
_DTYPES = {name: np.dtype(name) for name in ("float16", "float32", "float64")}


def declare_dense(entries: DenseEntries, slices: Mapping[int, Array]) -> list[Array]:
    """Adds an entry for each slice; the slices. Raises `BadGradient` for one that the wire has no place for."""
    for place, array in slices.items():
        if array.dtype.name not in _DTYPES or array.ndim != 1:
            raise BadGradient(
                f"dense values of variable {place}: {array.dtype} {list(array.shape)}; want one dimension of "
                f"{', '.join(_DTYPES)}"
            )
        entries.add(place=place, dtype=array.dtype.name, size=len(array))
    return list(slices.values())


def plan_dense(plan: BodyPlan, message: str, entries: DenseEntries) -> None:
    """Plans the arrays of `declare_dense`. Raises `BadInput` for a variable named twice, or what cannot be."""
    if len({entry.place for entry in entries}) < len(entries):
        raise BadInput(f"{message}: a dense variable stands in it twice")
    for entry in entries:
        plan.add(f"slice of variable {entry.place}", (entry.size,), dtype_of(message, entry))


def taken_dense(entries: Iterable[store_pb2.DenseSlice], arrays: Iterator[Array]) -> dict[int, Array]:
    """The next arrays of a body, by place."""
    return {entry.place: next(arrays) for entry in entries}


def dtype_of(message: str, entry: store_pb2.DenseSlice) -> np.dtype[np.generic]:
    """Of an entry. Raises `BadInput`: none that dense variables have."""
    if entry.dtype not in _DTYPES:
        raise BadInput(
            f"{message}: dense variable {entry.place} has dtype {entry.dtype!r}; known dtypes are {', '.join(_DTYPES)}"
        )
    return _DTYPES[entry.dtype]
