"""Converts Arrow columns to arrays of records: exactly, or not at all; errors name file, record, column and value."""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from elastable.embedding_store.contract.arrays import Array, Int64
from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.batch.ragged import Leaf, RaggedArray, concatenated, other_length
from elastable.worker.readers.batch.reader import ModelInputs

BITS = "uint64-bits"
"""What `column_types` calls unsigned ids whose bits are kept as an int64."""
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
"""dtypes of inputs of integers."""
_EXACT = {16: 2**11, 32: 2**24, 64: 2**53}
"""Bits of a float -> the first integer that another one may have been rounded to."""
_FLOATS = ("float16", "float32", "bfloat16")
_VIEWS = (pa.types.is_list_view, pa.types.is_large_list_view)
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, *_VIEWS)
_SCALARS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
_TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
_BYTES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)


@dataclass(frozen=True, slots=True)
class At:
    """Where the values of a column are: "clicks.csv, line 7: column 'user'".

    Attributes:
        place: Number of a record in its block -> file and line, or file and row.
    """

    column: str
    place: Callable[[int], str]

    def __call__(self, record: int) -> str:
        return f"{self.place(record)}: column {self.column!r}"

    def of(self, record: Callable[[int], int]) -> "At":
        """The same for other numbers: `record` maps them to records."""
        return At(self.column, lambda number: self.place(record(number)))

    @property
    def keeps_bits(self) -> str:
        """What to write for ids of 64 bits without a sign."""
        return (
            f"column_types={{{self.column!r}: '{BITS}'}} keeps the 64 bits of a uint64 as an int64, and 'string' the "
            "digits, for et.Embedding to hash"
        )


@dataclass(frozen=True, slots=True)
class Column:
    """How the values of a column become arrays.

    Attributes:
        kind: Arrow type of its values, without dictionaries.
        named: Type that `column_types` names for values, which they are read as first; None: none.
        fill: An Arrow scalar that replaces null values, also those within lists; None: nulls in a float column become
            NaN, and in any other are an error.
        fill_list: Replacement of null lists; None: they are an error.
        wide: Whether floats keep their type; else they become float32.
        bits: Whether a uint64 becomes the int64 of the same bits.
        length: Values in each list, which then are one array; None: as the type says.
    """

    kind: pa.DataType
    named: pa.DataType | None = None
    fill: pa.Scalar | None = None
    fill_list: Sequence[object] | None = None
    wide: bool = False
    bits: bool = False
    length: int | None = None


class ColumnChoice:
    """The user's options about columns.

    Args:
        features: Names of the features; None: all columns but label and weight.
        label: The target's name; None: batches are `(x,)`.
        weight: The sample weight's name, if there is one.
        column_types: Column -> name of the Arrow type to read it, or the elements of its lists, as, such as "int64";
            "uint64-bits" for unsigned ids whose 64 bits are kept as an int64.
        fill_null: Column -> replacement of null values, also of those within lists.
        fill_null_list: Column -> replacement of null lists.

    Raises:
        BadInput: options that cannot be.
    """

    def __init__(
        self,
        features: Sequence[str] | None = None,
        label: str | None = None,
        weight: str | None = None,
        column_types: Mapping[str, str] | None = None,
        fill_null: Mapping[str, object] | None = None,
        fill_null_list: Mapping[str, Sequence[object]] | None = None,
    ) -> None:
        self.features, self.label = features, label
        self.targets = [name for name in (label, weight) if name is not None]
        self.column_types = {} if column_types is None else column_types
        self.fill_null = {} if fill_null is None else fill_null
        self.fill_null_list = {} if fill_null_list is None else fill_null_list
        if weight is not None and label is None:
            raise BadInput(f"weight={weight!r} without label; weights belong to targets")
        if isinstance(features, str):
            raise BadInput(f"features={features!r} is a string; give a list of column names")
        for option in ("column_types", "fill_null", "fill_null_list"):
            given = getattr(self, option)
            if not isinstance(given, Mapping):
                raise BadInput(f"{option}={given!r}: give a dict, column -> its value")
        for name, text in self.column_types.items():
            if not isinstance(text, str):
                raise BadInput(f"column_types={{{name!r}: {text!r}}}: give the name of an Arrow type, such as 'int64'")
            self.type_of(name)
        for name, value in self.fill_null.items():
            if value is None or isinstance(value, list | tuple | np.ndarray):
                raise BadInput(
                    f"fill_null={{{name!r}: {value!r}}}: give the value that takes the place of a null value; "
                    "fill_null_list= replaces null lists"
                )
        for name, values in self.fill_null_list.items():
            if not isinstance(values, list | tuple):
                raise BadInput(f"fill_null_list={{{name!r}: {values!r}}}: give a list, [] for an empty one")

        self.options = [*self.column_types, *self.fill_null, *self.fill_null_list]

    def want(self, name: str, inputs: ModelInputs) -> str:
        """dtype of the model's input that a column feeds, "number" for targets and weights; "": not known."""
        if BITS in self.column_types.get(name, ""):
            return ""  # it is an int64 of other meaning, whatever the input wants
        if name in self.targets and name not in inputs.dtypes:
            return "" if inputs.own_step else "number"
        return inputs.dtypes.get(name, "")

    def type_of(self, name: str) -> pa.DataType | None:
        """The Arrow type that `column_types` names for a column."""
        text = self.column_types.get(name)
        if text is None:
            return None
        listed = text.startswith("list<") and text.endswith(">")
        element = text[5:-1] if listed else text
        try:
            kind = pa.type_for_alias("uint64" if element == BITS else element)
        except ValueError as error:
            raise BadInput(
                f"column_types[{name!r}] is {text!r}, no Arrow type such as 'float64' or 'list<int64>'"
            ) from error
        return pa.list_(kind) if listed else kind

    def column(self, name: str, kinds: "Kinds", inputs: ModelInputs, wide: bool) -> Column:
        """A column for a model with these inputs; see `Column`.

        Args:
            kinds: (file, type of the column there).

        Raises:
            BadInput: types that have none in common, or that the input cannot take; a replacement of nulls that is not
                of the type.
        """
        bits, named = BITS in self.column_types.get(name, ""), self.type_of(name)
        kind = _merged_type(kinds if named is None else _read_as(kinds, named, name), self.want(name, inputs), name)
        element = None if named is None else _element_of(_plain_type(named, f"column_types[{name!r}]"))
        fill = _filling(name, self.fill_null[name], _element_of(kind)) if name in self.fill_null else None
        return Column(kind, element, fill, self.fill_null_list.get(name), wide, bits, inputs.lengths.get(name))


# Types


Kinds = Sequence[tuple[object, pa.DataType]]
"""(file, type of a column there)."""


def _element_of(kind: pa.DataType) -> pa.DataType:
    """The type within lists and dictionaries of any depth."""
    while _is_list(kind) or pa.types.is_dictionary(kind):
        kind = kind.value_type
    return kind


def _merged_type(kinds: Kinds, want: str, name: str) -> pa.DataType:
    """The one type that holds a column of several files exactly, and that the model's input takes."""
    where = f"column {name!r}"
    plain = [(file, _plain_type(kind, f"{file}: {where}")) for file, kind in kinds]
    elements = [(file, _element_of(kind)) for file, kind in plain]
    for file, kind in elements:
        _refuse_for(kind, want, name, file)
    # A file whose column holds nulls alone says nothing.
    plain = [(file, kind) for file, kind in plain if not pa.types.is_null(kind)] or plain
    element = pa.type_for_alias(want) if want in INTEGERS else pa.float64() if want in _FLOATS else None
    if element is None and all(pa.types.is_null(kind) for _, kind in elements):
        if want in ("", "number"):
            example = f"column_types={{{name!r}: 'float64'}}"
            raise BadInput(f"{plain[0][0]}: {where} holds nulls alone; say {example} or what it is")
        element = pa.string() if want == "string" else pa.float64()
    if element is not None:
        # Each file's values are converted by themselves: no integer becomes a float on its way to an integer.
        return _common([(file, _with_element(kind, element)) for file, kind in plain], where)
    if not want:
        _refuse_mixture([(file, kind) for file, kind in elements if not pa.types.is_null(kind)], name)
    return _common(plain, where)


def _refuse_mixture(kinds: Kinds, name: str) -> None:
    file, kind = next((each for each in kinds if not pa.types.is_floating(each[1])), (None, None))
    other, float_kind = next((each for each in kinds if pa.types.is_floating(each[1])), (None, None))
    if kind is not None and float_kind is not None:
        raise BadInput(
            f"{other}: column {name!r} is {float_kind}, and {kind} in {file}; say column_types={{{name!r}: 'int64'}} "
            "if its values are integers, else 'float64'"
        )


def _plain_type(kind: pa.DataType, where: str) -> pa.DataType:
    """The type without dictionaries, views and large offsets; raises `BadInput` for timestamps, structs and so on."""
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type, where)
    if pa.types.is_fixed_size_list(kind) and not _is_list(kind.value_type):
        return pa.list_(_plain_type(kind.value_type, where), kind.list_size)
    if _is_list(kind) and not pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain_type(kind.value_type, where))
    for tests, plain in ((_TEXTS, pa.string()), (_BYTES, pa.binary())):
        if any(test(kind) for test in tests):
            return plain
    if any(test(kind) for test in _SCALARS) or pa.types.is_null(kind):
        return kind
    raise BadInput(
        f"{where}: type {kind} is no number, boolean or string, nor a list of them; store it as one of these, set "
        "column_types, or leave it out of features"
    )


def _common(kinds: Kinds, where: str) -> pa.DataType:
    first, common = kinds[0]
    for file, kind in kinds[1:]:
        try:
            schemas = [pa.schema([("", common)]), pa.schema([("", kind)])]
            common = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
        except pa.ArrowException as error:
            raise BadInput(
                f"{file}: {where} is {kind}, and {common} in {first}; say by column_types= what to read it as"
            ) from error
    return common


def _refuse_for(kind: pa.DataType, want: str, name: str, file: object) -> None:
    text = pa.types.is_string(kind) or pa.types.is_binary(kind)
    if want == "string" and not text and not pa.types.is_null(kind):
        raise BadInput(
            f"{file}: column {name!r} is {kind}, and the model's input takes strings; say "
            f"column_types={{{name!r}: 'string'}} to give it the digits, or make the input one of integers"
        )
    if text and want not in ("", "string"):
        raise BadInput(
            f"{file}: column {name!r} is {kind}, and the model takes {want if want != 'number' else 'numbers'} there; "
            f"say column_types={{{name!r}: 'int64'}} if the text is digits, make the input one of strings, or convert "
            "it in transform="
        )


def _is_list(kind: pa.DataType) -> bool:
    return any(test(kind) for test in _LISTS)


def _with_element(kind: pa.DataType, element: pa.DataType) -> pa.DataType:
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(element, kind.list_size)
    return pa.list_(_with_element(kind.value_type, element)) if _is_list(kind) else element


def _read_as(kinds: Kinds, named: pa.DataType, name: str) -> Kinds:
    """The type to read a column as that `column_types` names; one named for lists may be that of their elements.

    Raises `BadInput` for files in which one value has several numbers or texts: times of two units, booleans beside
    digits.
    """
    text = any(test(_element_of(named)) for test in _TEXTS)
    said = [(file, element) for file, kind in kinds if not pa.types.is_null(element := _element_of(kind))]
    for file, element in said:
        first = said[0][1]
        if element != first and any(
            pa.types.is_temporal(each) or (text and pa.types.is_boolean(each)) for each in (element, first)
        ):
            raise BadInput(
                f"{file}: column {name!r} is {element}, and {first} in {said[0][0]}: as {named} one value would be two"
                "; write the files with one type"
            )
    return [(file, named if _is_list(named) else _with_element(there, named)) for file, there in kinds]


# Values


def to_array(values: pa.Array | pa.ChunkedArray, column: Column, at: At) -> Leaf:
    """A column of a block.

    Integers and booleans keep their type, floats become float32 (unless `wide`), strings object arrays of `str`, lists
    of one fixed size `[records, size]`, and other lists ragged. No integer passes through a float.

    Args:
        values: `[records]`, of any type that has a plain one.

    Raises:
        BadInput: a value that its type does not hold exactly, a null without replacement, a uint64 above 2**63 - 1,
            text that is not UTF-8, a list of another length than the column's.
    """
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if isinstance(values, pa.ChunkedArray):  # of more bytes than one array holds
        starts = np.cumsum([0, *map(len, values.chunks)]).tolist()
        parts = zip(values.chunks, starts, strict=False)
        return concatenated([to_array(part, column, at.of(partial(operator.add, start))) for part, start in parts])
    if not _is_list(column.kind):
        return _elements(values, column, at)
    made = _list(values, column, column.kind, at)
    return made if column.length is None else _of_length(made, column.length, at)


def _of_length(lists: Leaf, length: int, at: At) -> Leaf:
    """Lists of this length, as one array where their elements are; raises `BadInput` for a list of another length."""
    if isinstance(lists, np.ndarray):
        lengths = np.full(len(lists), lists.shape[1])
    else:
        assert isinstance(lists, RaggedArray)
        lengths = np.diff(lists.splits)
    other = np.flatnonzero(lengths != length)
    if other.size:
        raise BadInput(f"{at(int(other[0]))}: {other_length(int(lengths[other[0]]), length)}")
    if isinstance(lists, RaggedArray) and isinstance(lists.values, np.ndarray):
        return lists.values.reshape(len(lists), length, *lists.values.shape[1:])
    return lists


def as_type(values: pa.Array, kind: pa.DataType, at: At) -> pa.Array:
    """`values` as an Arrow type that holds them exactly; nulls stay.

    Raises:
        BadInput: a value that it does not hold.
    """
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if values.type == kind:
        return values
    if pa.types.is_floating(values.type) and not pa.types.is_floating(kind):
        return _float_as_integer(values, kind, at)
    try:
        return _cast(values, kind)
    except pa.ArrowException as error:
        bad = first_bad(len(values), lambda stop: casts(values[:stop], kind))
        hint = _hint(values[bad : bad + 1], kind, at)
        raise BadInput(f"{at(bad)}: {_short(values[bad])} is no {kind}{hint}") from error


def first_bad(records: int, good: Callable[[int], bool]) -> int:
    """The first record that makes a prefix bad, by bisection; `good` says whether the first n records are good."""
    low, high = 0, records
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def casts(values: pa.Array, kind: pa.DataType) -> bool:
    """Whether every value is one of the type."""
    return _succeeds(lambda: _cast(values, kind))


def _cast(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """As Arrow casts, but decimals that are equal become one text, no integer but 0 and 1 a boolean, and "+1" is 1."""
    if pa.types.is_decimal(values.type) and pa.types.is_string(kind):
        values = values.cast(pa.decimal256(76, 0))
    if pa.types.is_string(values.type) and pa.types.is_integer(kind):
        values = pc.replace_substring_regex(values, r"^\+([0-9])", r"\1")
    # A float is approximate: an integer is rounded to it, as by Keras; where it is an id, et.Embedding refuses it.
    rounds = pa.types.is_integer(values.type) and pa.types.is_floating(kind)
    made = values.cast(kind, safe=not rounds)
    if pa.types.is_integer(values.type) and pa.types.is_boolean(kind) and not made.cast(values.type).equals(values):
        raise pa.ArrowInvalid("neither 0 nor 1")
    return made


def _succeeds(read: Callable[[], object]) -> bool:
    try:
        read()
    except pa.ArrowException:
        return False
    return True


def _hint(value: pa.Array, kind: pa.DataType, at: At) -> str:
    digits = pa.types.is_string(value.type) and re.fullmatch(r"\s*[+-]?[0-9]+\s*", value[0].as_py())
    if pa.types.is_int64(kind) and (digits or pa.types.is_uint64(value.type)):
        return f"; {at.keeps_bits}"
    if pa.types.is_string(value.type) and pa.types.is_integer(kind) and not digits and casts(value, pa.float64()):
        return f"; say column_types={{{at.column!r}: 'float64'}} for a column of floats"
    if pa.types.is_temporal(value.type):
        number = f"'int{value.type.bit_width}'"
        return f"; say column_types={{{at.column!r}: {number}}} for its number of days or other units, or 'string'"
    if pa.types.is_decimal(value.type) and pa.types.is_string(kind):
        return ", because a fraction has several texts; write the column as text"
    if pa.types.is_binary(value.type) and pa.types.is_string(kind):
        return " in UTF-8; say encoding= of a CSV file, such as 'latin-1'"
    return ""


def _short(value: pa.Scalar) -> str:
    text = repr(value.as_py())
    return text if len(text) <= 60 else f"{text[:60]}... ({len(text)} characters)"


def _float_as_integer(values: pa.Array, kind: pa.DataType, at: At) -> pa.Array:
    """Integral floats as integers, booleans or digits; NaN, as pandas writes a null, as null."""
    floats = np.asarray(values.to_numpy(zero_copy_only=False))
    missing = np.isnan(floats)
    limit = _EXACT[values.type.bit_width]
    with np.errstate(invalid="ignore"):
        bad = np.flatnonzero(~missing & ~((np.abs(floats) < limit) & (np.trunc(floats) == floats)))
    if bad.size:
        value = float(floats[bad[0]])
        text = pa.types.is_string(kind)
        why = f"it is none{'; write the column as text' if text else ''}"
        if value.is_integer():
            only = f"{values.type} is exact below 2**{limit.bit_length() - 1} only, and others may have become this one"
            why = f"{only}; {at.keeps_bits if value >= 2.0**63 and not text else 'write the column as integers'}"
        raise BadInput(f"{at(int(bad[0]))}: {value!r} where integers are wanted: {why}")
    whole = np.where(missing, 0, floats).astype(np.int64)
    return as_type(pa.array(whole, mask=missing), kind, at)


def _elements(values: pa.Array, column: Column, at: At) -> Array:
    element = _element_of(column.kind)
    values = as_type(values if column.named is None else as_type(values, column.named, at), element, at)
    if values.null_count and column.fill is not None:
        values = pc.fill_null(values, column.fill)
    if pa.types.is_floating(element):
        floats = np.asarray(values.to_numpy(zero_copy_only=False))
        if column.fill is not None:
            floats = np.where(np.isnan(floats), floats.dtype.type(column.fill.as_py()), floats)
        return floats if column.wide else floats.astype(np.float32, copy=False)
    if values.null_count:
        first = pc.index(pc.is_null(values), True).as_py()
        raise BadInput(
            f"{at(first)}: null, one of {values.null_count} nulls in a column of {element}; say "
            f"fill_null={{{at.column!r}: value}}, the value that takes their place"
        )
    try:
        made = np.asarray(values.to_numpy(zero_copy_only=False))
    except (pa.ArrowException, UnicodeDecodeError) as error:
        bad = first_bad(len(values), lambda stop: _succeeds(lambda: values[:stop].validate(full=True)))
        raise BadInput(f"{at(bad)}: is no UTF-8: {error}") from error
    if made.dtype != np.uint64:
        return made
    if not column.bits and made.size and made.max() > 2**63 - 1:
        bad = int(np.argmax(made > 2**63 - 1))
        raise BadInput(f"{at(bad)}: {made[bad]} is above 2**63 - 1, the largest id; {at.keeps_bits}")
    return made.view(np.int64) if column.bits else made


def _filling(name: str, fill: object, kind: pa.DataType) -> pa.Scalar:
    """The Arrow scalar, or list, that replaces nulls of type `kind`."""
    try:
        made = pa.scalar(fill, kind)
        if pa.types.is_integer(_element_of(kind)) and made.as_py() != fill:  # Arrow cuts fractions off
            raise ValueError("it would be changed")
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise BadInput(f"column {name!r}: nulls cannot become {fill!r}, which is no {kind}: {error}") from error
    return made


def _list(values: pa.Array, column: Column, kind: pa.DataType, at: At) -> Leaf:
    if pa.types.is_null(values.type):
        values = pa.nulls(len(values), kind)
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if not _is_list(values.type):
        raise BadInput(f"{at(0)}: {values.type}, where a {kind} is expected")
    if values.null_count:
        values = _fill_lists(values, column, at)
    lengths = np.asarray(pc.list_value_length(values).to_numpy(zero_copy_only=False), np.int64)
    ends: Int64 = np.cumsum(lengths)
    inner = values.flatten()

    inside = at.of(lambda element: int(np.searchsorted(ends, element, side="right")))
    below = _list(inner, column, kind.value_type, inside) if _is_list(kind.value_type) else None
    flat = _elements(inner, column, inside) if below is None else below
    if pa.types.is_fixed_size_list(kind):
        assert isinstance(flat, np.ndarray)  # no list is within one of fixed size
        return flat.reshape(len(values), kind.list_size)
    return RaggedArray.of_lengths(flat, lengths)  # type: ignore[arg-type]


def _fill_lists(values: pa.Array, column: Column, at: At) -> pa.Array:
    first = pc.index(pc.is_null(values), True).as_py()
    if column.fill_list is None:
        size = values.type.list_size if pa.types.is_fixed_size_list(values.type) else 0
        raise BadInput(
            f"{at(first)}: null, one of {values.null_count} null lists; say fill_null_list={{{at.column!r}: "
            f"{'[...]' if size else '[]'}}}, or another list{f' of {size} values' if size else ''} in their place"
        )
    return pc.fill_null(values, _filling(at.column, list(column.fill_list), values.type))
