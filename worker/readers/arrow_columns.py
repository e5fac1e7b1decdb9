"""Arrow columns as NumPy arrays, and the refusal of those that are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.nests import Array

__all__ = ["ColumnChoice", "refuse_type", "to_arrays"]


@dataclass(frozen=True, slots=True)
class ColumnChoice:
    """Which columns are features, target and weight.

    Attributes:
        features: Names; None: all columns that are neither label nor weight.
        label: The target's name; None: batches are `(x,)`.
        weight: The sample weight's name, if there is one.
        fill_null: Column -> value in place of nulls. Without one, nulls in a
            column of floats are NaN, and in any other column an error.
    """

    features: Sequence[str] | None = None
    label: str | None = None
    weight: str | None = None
    fill_null: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.weight is not None and self.label is None:
            raise BadInput(f"weight={self.weight!r} without label; weights belong to targets")
        if isinstance(self.features, str):
            raise BadInput(f"features={self.features!r} is a string; give a list of column names")

    def feature_names(self, found: Sequence[str], source: str) -> list[str]:
        """The features among the columns `found` in `source`.

        Raises:
            BadInput: a column that was chosen and is not there, or no features.
        """
        others = [name for name in (self.label, self.weight) if name is not None]
        names = [name for name in found if name not in others] if self.features is None else list(self.features)
        for name in [*names, *others, *self.fill_null]:
            if name not in found:
                raise BadInput(f"{source}: no column {name!r}; its columns are {', '.join(found)}")
        if not names:
            raise BadInput(f"{source}: no feature columns besides {', '.join(others)}")
        return names

    def columns(self, features: Sequence[str]) -> list[str]:
        """Features, label and weight, each once."""
        return list(dict.fromkeys([*features, *(name for name in (self.label, self.weight) if name is not None)]))


def to_arrays(table: Any, fill_null: Mapping[str, Any], source: str) -> dict[str, Array]:
    """The columns of an Arrow table.

    Integers and booleans keep their type, floats become float32, strings (also
    dictionary-encoded ones) object arrays of `str`, and lists of one fixed size
    `[records, size]`.

    Raises:
        BadInput: ragged lists, nulls where they cannot be, other types.
    """
    return {
        name: _to_array(table.column(name).combine_chunks(), fill_null.get(name), f"{source}: column {name!r}")
        for name in table.column_names
    }


def _to_array(values: Any, fill: Any, where: str) -> Array:
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_fixed_size_list(values.type) and values.null_count == 0:
        flat = _to_array(values.flatten(), fill, where)
        return flat.reshape(len(values), values.type.list_size)
    refuse_type(values.type, where)
    if values.null_count and fill is not None:
        values = pc.fill_null(values, fill)
    if pa.types.is_floating(values.type):
        return np.asarray(values.to_numpy(zero_copy_only=False)).astype(np.float32, copy=False)
    if values.null_count:
        raise BadInput(
            f"{where}: {values.null_count} nulls in a column of {values.type}; say fill_null={{name: value}}"
        )
    return np.asarray(values.to_numpy(zero_copy_only=False))


def refuse_type(kind: Any, where: str) -> None:
    """Refuses an Arrow type that makes no array.

    Raises:
        BadInput: ragged lists, timestamps, structs and the like.
    """
    if pa.types.is_dictionary(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        raise BadInput(
            f"{where}: {kind} is ragged; store lists of one size as a fixed_size_list, "
            "or write a Reader whose take() returns a ragged tensor"
        )
    plain = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_string)
    if not any(test(kind) for test in (*plain, pa.types.is_large_string, pa.types.is_binary)):
        raise BadInput(f"{where}: type {kind} is no number, boolean or string; store it as one")
