"""Converts Arrow columns to arrays of records, and refuses other types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.records.pytrees import Leaf, refuse_large_ids
from elastable.worker.readers.records.ragged import RaggedArray

__all__ = ["ColumnChoice", "arrow_types", "refuse_type", "to_arrays"]


@dataclass(frozen=True, slots=True)
class ColumnChoice:
    """The columns that are features, target and weight.

    Attributes:
        features: Their names; None: all columns but label and weight.
        label: The target's name; None: batches are `(x,)`.
        weight: The sample weight's name, if there is one.
        fill_null: Column -> replacement of nulls; [] for empty lists. Without one, nulls in a float column become NaN,
            and in any other column are an error.
    """

    features: Sequence[str] | None = None
    label: str | None = None
    weight: str | None = None
    fill_null: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.weight is not None and self.label is None:
            raise BadInput(f"weight={self.weight!r} without label; weights belong to targets")
        if isinstance(self.features, str):
            raise BadInput(f"features={self.features!r} is a string; give a list of column names")

    def feature_names(self, found: Sequence[str], source: str) -> list[str]:
        """The features among the columns `found` in `source`.

        Raises:
            BadInput: a chosen column is missing or occurs twice, or there are no features.
        """
        others = [name for name in (self.label, self.weight) if name is not None]
        found = list(found)
        names = [name for name in found if name not in others] if self.features is None else list(self.features)
        for name in [*names, *others, *self.fill_null]:
            if name not in found:
                raise BadInput(f"{source}: no column {name!r}; its columns are {', '.join(found)}")
            if found.count(name) > 1:
                raise BadInput(f"{source}: {found.count(name)} of its columns are called {name!r}; rename all but one")
        if not names:
            raise BadInput(f"{source}: no feature columns besides {', '.join(others)}")
        return names

    def columns(self, features: Sequence[str]) -> list[str]:
        """Features, label and weight, each once."""
        return list(dict.fromkeys([*features, *(name for name in (self.label, self.weight) if name is not None)]))


def arrow_types(wanted: Mapping[str, str], known: Sequence[str], source: str) -> dict[str, pa.DataType]:
    """Column -> Arrow type, from the user's `column_types`.

    Args:
        wanted: Column -> name of an Arrow type such as "int64"; "list<int64>" for lists.
        known: The existing columns.
        source: For messages.

    Raises:
        BadInput: an unknown column or type.
    """
    types = {}
    for name, kind in wanted.items():
        if name not in known:
            raise BadInput(f"{source}: column_types names {name!r}; the columns are {', '.join(known)}")
        element = kind[5:-1] if kind.startswith("list<") and kind.endswith(">") else kind
        try:
            types[name] = pa.type_for_alias(element)
        except ValueError as error:
            raise BadInput(
                f"{source}: column_types[{name!r}] is {kind!r}, no Arrow type such as 'float64' or 'list<int64>'"
            ) from error
        if element is not kind:
            types[name] = pa.list_(types[name])
    return types


def to_arrays(table: pa.Table, fill_null: Mapping[str, object], source: str) -> dict[str, Leaf]:
    """The columns of an Arrow table.

    Integers and booleans keep their type, floats become float32, strings (also dictionary-encoded ones) object arrays
    of `str`, lists of one fixed size `[records, size]`, and other lists ragged. No integer passes through a float.

    Raises:
        BadInput: nulls that are not allowed, a uint64 above 2**63 - 1, other types.
    """
    return {
        name: _to_array(table.column(name).combine_chunks(), fill_null.get(name), f"{source}: column {name!r}")
        for name in table.column_names
    }


def _to_array(values: pa.Array, fill: object, where: str) -> Leaf:
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    refuse_type(values.type, where)
    if pa.types.is_fixed_size_list(values.type) and values.null_count == 0:
        flat = _to_array(values.flatten(), fill, where)
        assert isinstance(flat, np.ndarray)  # refuse_type admits no lists within
        return flat.reshape(len(values), values.type.list_size)
    if _is_list(values.type):
        return _to_ragged(values, fill, where)
    if values.null_count and fill is not None:
        try:
            values = pc.fill_null(values, fill)
        except (pa.ArrowException, TypeError) as error:
            raise BadInput(f"{where}: fill_null={fill!r} is no {values.type}: {error}") from error
    if pa.types.is_floating(values.type):
        return np.asarray(values.to_numpy(zero_copy_only=False)).astype(np.float32, copy=False)
    if values.null_count:
        raise BadInput(
            f"{where}: {values.null_count} nulls in a column of {values.type}; say fill_null={{name: value}}"
        )
    return refuse_large_ids(np.asarray(values.to_numpy(zero_copy_only=False)), where)


def _to_ragged(values: pa.Array, fill: object, where: str) -> RaggedArray:
    lengths = pc.list_value_length(values)
    if values.null_count:
        if not isinstance(fill, list) or fill:
            raise BadInput(f"{where}: {values.null_count} null lists; say fill_null={{name: []}} for empty ones")
        lengths = pc.fill_null(lengths, 0)
    # flatten() skips what lies beneath nulls.
    flat = _to_array(values.flatten(), None if isinstance(fill, list) else fill, where)
    return RaggedArray.of_lengths(flat, lengths.to_numpy(zero_copy_only=False))  # type: ignore[arg-type]


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def refuse_type(kind: pa.DataType, where: str) -> None:
    """Refuses an Arrow type that cannot become an array.

    Raises:
        BadInput: timestamps, structs, maps and the like; lists within lists of one fixed size.
    """
    whole = kind
    while pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    if pa.types.is_fixed_size_list(kind) or pa.types.is_dictionary(kind):
        kind = kind.value_type
    plain = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_string)
    if not any(test(kind) for test in (*plain, pa.types.is_large_string, pa.types.is_binary)):
        raise BadInput(
            f"{where}: type {whole} is no number, boolean or string, nor a list of them; store it as one of these, "
            "or set column_types"
        )
