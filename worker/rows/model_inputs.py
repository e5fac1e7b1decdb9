"""What a model's integer inputs are given: exact integers, or an error; never what a cast makes of a float."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import keras
import numpy as np

from elastable.embedding_store.contract.arrays import Array, Int64
from elastable.embedding_store.errors import BadIds, BadInput, IdOutOfRange, Unsupported
from elastable.embedding_store.tables.checks import first_inexact, refuse_masked, why_no_id
from elastable.master.backend.contract import backend
from elastable.master.backend.lazy import tf
from elastable.worker.keras.keras_methods import rows_unlisted, wrap_method
from elastable.worker.keras.seeds import layers_of
from elastable.worker.readers.batch.pytrees import Structure
from elastable.worker.readers.batch.ragged import Leaf, RaggedArray, SparseArray, map_values, other_length
from elastable.worker.rows.id_values import BELONGS, assertion_of, called, exact_tensor

_READING = ("predict", "evaluate", "predict_on_batch", "test_on_batch")


_Convert: TypeAlias = "Callable[[object, _Input | keras.KerasTensor], object]"

_WIDEST = 8  # bytes of a number


@dataclass(frozen=True, slots=True)
class _Input:
    """What is read of a model's input; of a Sequential model that has not made it yet, and takes ids: all of it."""

    name: str
    dtype: str = "int64"
    shape: tuple[int | None, ...] = ()


def list_length(given: _Input | keras.KerasTensor) -> int | None:
    """Number of values in each list that an input takes; None: any, or no lists."""
    ragged = getattr(given, "ragged", False) or getattr(given, "sparse", False)
    length: int | None = given.shape[1] if len(given.shape) > 1 and not ragged else None
    return length


def pads_lists(given: _Input | keras.KerasTensor) -> bool:
    """Whether the lists of an input are padded with 0, on a backend without ragged tensors.

    That is where tables alone take it, of any length, whose layers leave the id 0 out; or as the weights of ids.
    """
    if backend().has_graphs or isinstance(given, _Input) or list_length(given) is not None:
        return False
    nodes = given._keras_history.operation._outbound_nodes
    return bool(nodes) and all(
        hasattr(node.operation, "table_spec")
        and (getattr(node.operation, "mask_zero", False) or node.arguments.args[0] is not given)
        for node in nodes
    )


def padded_lists(leaf: object, given: _Input | keras.KerasTensor) -> object:
    """Lists of numbers as an array `[records, width]`, with zeros behind them, where `pads_lists`; others as they are.

    The width is the power of two that the longest list needs, so that few widths are compiled.
    """
    if not isinstance(leaf, RaggedArray | SparseArray) or not pads_lists(given):
        return leaf
    flat, values = leaf.indices.shape[1] == 1 if isinstance(leaf, SparseArray) else True, leaf.values
    if not flat or not isinstance(values, np.ndarray) or values.ndim != 1:
        return leaf
    lengths = np.diff(leaf.splits)
    width = 1 << (max(1, int(lengths.max(initial=1))) - 1).bit_length()
    made = np.zeros((len(leaf), width), values.dtype)
    made[np.arange(width) < lengths[:, np.newaxis]] = values
    return made


def map_inputs(model: keras.Model, x: object, function: _Convert) -> object:
    """What the model is called with, with `function` applied to each value that an input of known dtype is given.

    Args:
        model: A model. What a subclass of `keras.Model` takes is not known: `x` is returned as it is.
        x: Arrays or tensors as the model is called with them: one, or by name, or in the order of the inputs.
        function: (value, input) -> value.
    """
    inputs = inputs_of(model)
    return x if inputs is None else _mapped(x, inputs, function)


def inputs_of(model: keras.Model) -> Structure[_Input | keras.KerasTensor] | None:
    """A model's inputs in the structure that it is called with; None: nothing is known of them."""
    if isinstance(model, keras.Sequential):
        return _sequential_input(model)
    try:
        made: Structure[_Input | keras.KerasTensor] = model.input
        return made
    except (AttributeError, ValueError):  # a subclass without inputs
        return None


def _sequential_input(model: keras.Sequential) -> Structure[_Input | keras.KerasTensor] | None:
    # Not its `input`, which is of the model around it, or missing. Keras assumes floats where it makes the input layer.
    made = next(iter(model._layers), None)
    given = made.output if isinstance(made, keras.layers.InputLayer) else None
    first = next(iter(model.layers), None)
    if isinstance(first, keras.Model) and (given is None or "float" in given.dtype):
        within = inputs_of(first)
        return given if within is None else within
    if given is not None:
        return given
    return _Input(str(first.name)) if first is not None and hasattr(first, "table_spec") else None


def _mapped(x: object, inputs: Structure[_Input | keras.KerasTensor], function: _Convert) -> object:
    one = list(inputs.values()) if isinstance(inputs, Mapping) else inputs
    if isinstance(one, list | tuple) and len(one) == 1 and not isinstance(x, list | tuple | Mapping):
        return _mapped(x, one[0], function)
    if isinstance(x, Mapping):
        named = inputs if isinstance(inputs, Mapping) else {each.name: each for each in keras.tree.flatten(inputs)}
        return {key: _mapped(value, named[key], function) if key in named else value for key, value in x.items()}
    if isinstance(x, list | tuple):
        ordered = keras.tree.flatten(inputs) if isinstance(inputs, Mapping) else inputs
        if isinstance(ordered, list | tuple) and len(ordered) == len(x):
            found = [_mapped(value, each, function) for value, each in zip(x, ordered, strict=True)]
            return found if isinstance(x, list) else tuple(found)
        return x
    if isinstance(inputs, _Input) and isinstance(x, np.ndarray) and is_text(x):
        return _as_strings(x)
    return x if isinstance(inputs, Sequence | Mapping) else function(x, inputs)


def is_text(array: Array) -> bool:
    """Whether an array holds strings, also as objects; an empty one of objects does not."""
    if array.dtype.kind == "O":
        return bool(array.size) and all(isinstance(each, str | bytes) for each in array.flat)
    return array.dtype.kind in "SU"


def exact_inputs(model: keras.Model, x: object) -> object:
    """What a model is called with, with exact integers where its inputs are integers.

    NumPy's strings become tensors, which Keras reads.

    Raises:
        BadIds: a value that its input cannot hold, with input, record and value, in eager mode. A graph raises
            `tf.errors.InvalidArgumentError` when it runs.
    """
    return map_inputs(model, x, _exact)


def _exact(value: object, given: _Input | keras.KerasTensor) -> object:
    name, dtype = given.name, given.dtype
    if isinstance(value, keras.KerasTensor) or value is None:
        return value
    graphs = backend().has_graphs
    if graphs and isinstance(value, tf.RaggedTensor) and tf.executing_eagerly():
        _require_length(np.asarray(value.row_lengths()), "x", given, None)
    if not graphs and keras.ops.is_tensor(value):
        return value
    if graphs and isinstance(value, tf.Tensor | tf.RaggedTensor | tf.SparseTensor):
        return exact_tensor(value, name, dtype) if "int" in dtype else value
    if not hasattr(value, "__array__"):
        return value
    refuse_masked(value, called(name))
    array = np.asarray(value)
    if "int" in dtype:
        return exact_leaf(array, given, "x")
    if dtype == "string" and array.dtype.kind == "O" and array.size and not is_text(array):
        place = next(place for place, each in enumerate(array.flat) if not isinstance(each, str | bytes))
        raise BadIds(f"x: {called(name)}: record {_record_of(array, place)}: {array.flat[place]!r} is no string")
    return _as_strings(array) if is_text(array) else value


def _as_strings(array: Array) -> tf.Tensor:
    """Raises `Unsupported` on another backend than TensorFlow."""
    if backend().has_graphs:
        return tf.constant(array)
    raise Unsupported(
        f"an input of strings on Keras' {backend().name} backend, which has none: hash them before, in the reader or "
        "by et.hash_ids, and give the model a keras.Input of int64"
    )


def _require_length(
    lengths: Array, source: str, given: _Input | keras.KerasTensor, numbers: Sequence[int] | Int64 | None
) -> None:
    """Raises `BadInput` for lists of another length than the input's shape says."""
    wanted = list_length(given)
    other = np.flatnonzero(lengths != wanted)
    if wanted is not None and other.size:
        record = int(other[0])
        number = record if numbers is None else numbers[record]
        raise BadInput(f"{source}: {called(given.name)}: record {number}: {other_length(int(lengths[record]), wanted)}")


def exact_leaf(
    leaf: object, given: _Input | keras.KerasTensor, source: str, numbers: Sequence[int] | Int64 | None = None
) -> object:
    """The values that an integer input is given, in its dtype: integers, and floats that are; others as they are.

    Args:
        leaf: Records; a tensor is one of a reader of the user's own.
        given: The input; only an integer one is looked at.
        source: Where they are from, for messages.
        numbers: Number of each record, for messages; None: its place.

    Raises:
        BadIds: a value that the input cannot hold, with input, record and value.
        BadInput: a list of another length than its shape says.
    """
    name, dtype = given.name, given.dtype
    if isinstance(leaf, RaggedArray):
        _require_length(np.diff(leaf.splits), source, given, numbers)
    if dtype == "string" and isinstance(leaf, np.ndarray) and leaf.dtype.kind in "iufb":
        raise BadInput(
            f"{source}: {called(name)} is given {leaf.dtype}, and takes strings; give it text (of a file by "
            "column_types={column: 'string'}, else .astype(str)), or make the input one of integers"
        )
    if "int" not in dtype:
        return leaf
    if not isinstance(leaf, np.ndarray | RaggedArray | SparseArray):
        return _exact(leaf, given)
    values = leaf if isinstance(leaf, np.ndarray) else _values_of(leaf)
    if values.dtype.kind in "SUOc" or values.dtype.itemsize > _WIDEST:
        values = _plain_numbers(f"{source}: {called(name)}", leaf, values, dtype, numbers)
        leaf = map_values(lambda _: values, leaf)
    if values.dtype.kind == "f":
        place = first_inexact(values)
        exact = values if place is not None else values.astype(np.int64)
    elif values.dtype.kind in "iu":
        place, exact = None, values
    else:
        return leaf
    reason = "" if place is None else why_no_id(values.ravel()[place])
    if place is None and not np.can_cast(exact.dtype, dtype) and exact.size:
        limits = np.iinfo(dtype)
        outside = (exact < limits.min) | (exact > limits.max)
        if outside.any():
            place = int(np.argmax(outside))
            reason = f"{exact.ravel()[place]} is no {dtype}"
    if place is not None:
        record = _record_of(leaf, place)
        number = record if numbers is None else numbers[record]
        raise BadIds(f"{source}: {called(name)}: record {number}: {reason}; {BELONGS.format(dtype)}")
    exact = exact.astype(dtype, copy=False)
    return exact if isinstance(leaf, np.ndarray) else map_values(lambda _: exact, leaf)


def _plain_numbers(where: str, leaf: Leaf, values: Array, dtype: str, numbers: Sequence[int] | Int64 | None) -> Array:
    """Objects that are numbers as these; raises `BadIds` for text, nulls, complex and extended numbers."""
    for place, value in enumerate(values.ravel()):
        if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool | np.longdouble):
            continue
        record = _record_of(leaf, place)
        number = record if numbers is None else numbers[record]
        plain = value.item() if isinstance(value, np.generic) else value
        shown = str(plain) if isinstance(plain, np.generic) else repr(plain)  # numbers that Python has not stay NumPy's
        raise BadIds(f"{where}: record {number}: {shown} is no integer; {BELONGS.format(dtype)}")
    return np.array(values.tolist()).reshape(values.shape)


def _values_of(leaf: Leaf) -> Array:
    return leaf if isinstance(leaf, np.ndarray) else _values_of(leaf.values)


def _record_of(leaf: Leaf, place: int) -> int:
    if isinstance(leaf, np.ndarray):
        return place // max(1, leaf.size // len(leaf)) if leaf.ndim else 0
    if isinstance(leaf, RaggedArray):
        place = _record_of(leaf.values, place)
    return int(np.searchsorted(leaf.splits, place, side="right")) - 1


def wrap_reading_methods() -> None:
    """Wraps the methods of `keras.Model` that read rows, and its call; a second call changes nothing.

    Keras would cast floats to the input's dtype: 1.7 would be id 1, NaN -2**63. They take exact inputs, and say as an
    `ElastableError` what a graph's assertion about ids has found.
    """
    for name in _READING:
        wrap_method(name, _read)
    wrap_method("__call__", _call)


def _takes_ids(model: keras.Model) -> bool:
    return any(hasattr(layer, "takes_ids") for layer in layers_of(model))


def _read(
    plain: Callable[..., object], model: keras.Model, x: object = None, *args: object, **kwargs: object
) -> object:
    if not _takes_ids(model):
        return plain(model, x, *args, **kwargs)
    if not backend().has_graphs:
        # Of JAX, Keras hands the values of all variables to a compiled function.
        given = exact_inputs(model, x)
        with _exactly(model, given), rows_unlisted() if backend().name == "jax" else nullcontext():
            return plain(model, given, *args, **kwargs)
    try:
        return plain(model, exact_inputs(model, x), *args, **kwargs)
    except tf.errors.InvalidArgumentError as error:
        message = assertion_of(error)
        if message is None:
            raise
        raise (IdOutOfRange if " is outside 0 <= id < " in message else BadIds)(message) from error


def _exactly(model: keras.Model, x: object) -> AbstractContextManager[object]:
    """A context in which Keras leaves the ids of a call what they are; where it has all of them anyway, it is no other.

    Args:
        x: Arrays; or what gives batches of ids, which are known by then only from what the tables take.
    """
    leaves = keras.tree.flatten(x)
    known = all(each is None or hasattr(each, "dtype") or isinstance(each, int | float) for each in leaves)
    tables = [each for each in layers_of(model) if hasattr(each, "table_spec")]
    arrays = [each for each in leaves if isinstance(each, np.ndarray)]
    if (arrays or not known) and any(each.input_dim is None for each in tables):
        return backend().exact_ids()  # plain Keras has no such tables, and ids computed in the model may be of any size
    needed = backend().needs_exact_ids(arrays) if known else any(each.input_dim > 2**31 for each in tables)
    return backend().exact_ids() if needed else nullcontext()


def _call(plain: Callable[..., object], model: keras.Model, *args: object, **kwargs: object) -> object:
    if args and not isinstance(args[0], keras.KerasTensor) and _takes_ids(model):
        args = (exact_inputs(model, args[0]), *args[1:])
        if not backend().has_graphs:
            with _exactly(model, args[0]):
                return plain(model, *args, **kwargs)
    return plain(model, *args, **kwargs)
