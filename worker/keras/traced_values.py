"""What a trace of a model's train function holds as constants: attributes of layers, losses and metrics, globals.

Keras traces its step once after `compile` and trains on with the trace, whatever is assigned to `dropout.rate` since;
here every `fit` traces anew. So what was changed between two trainings is refused. Eager models read it every time.
"""

import enum
import functools
import types
import zlib
from collections.abc import Iterator, Mapping

import keras
import numpy as np
import tensorflow as tf

from elastable.worker.keras.seeds import layers_of

_LIBRARIES = ("keras", "tensorflow", "elastable", "numpy")
_SKIPPED = (keras.Layer, keras.Variable, keras.Optimizer, keras.KerasTensor, keras.Initializer, types.ModuleType, type)
_SCALARS = (type(None), bool, int, float, complex, str, bytes, np.generic, enum.Enum)
_MOST_ELEMENTS = 1000  # of a list; of a longer one its length counts


def traced_values(model: keras.Model) -> dict[str, object]:
    """Name, as `layer 'dropout'.rate` -> a function, or what is written of a value."""
    found: dict[str, object] = {}
    for name, part in _parts(model):
        _read(name, part, found, set())
    return found


def _parts(model: keras.Model) -> Iterator[tuple[str, object]]:
    bare, names = _bare(), set()
    for number, layer in enumerate(layers_of(model)):
        name = f"layer {layer.name!r}" if layer.name not in names else f"layer {layer.name!r} (layer {number})"
        names.add(layer.name)
        yield f"{name}.dtype", layer.dtype_policy.name
        yield from ((f"{name}.{attribute}", value) for attribute, value in _of_own_classes(layer))
        if isinstance(layer, keras.Model) and _of_library(type(layer)):
            continue  # what a program keeps on it is not read by it
        own = hasattr(layer, "table_spec")
        for attribute, value in sorted(vars(layer).items()):
            if attribute not in bare and not attribute.startswith("_" if own else "_self_"):
                yield f"{name}.{attribute}", value
        yield f"{name}.activity_regularizer", layer.activity_regularizer
        for weight in layer._trainable_variables:
            yield f"weight {weight.path!r}.regularizer", weight.regularizer
            yield f"weight {weight.path!r}.constraint", weight.constraint
    yield "loss", model.loss
    config = getattr(model._compile_config, "config", {})
    yield from ((key, config.get(key)) for key in ("loss_weights", "metrics", "weighted_metrics"))


def _of_own_classes(layer: keras.Layer) -> Iterator[tuple[str, object]]:
    for kind in type(layer).__mro__:
        if not _of_library(kind) and kind is not object:
            for attribute, value in vars(kind).items():
                if isinstance(value, types.FunctionType) or not attribute.startswith("__"):
                    yield attribute, getattr(value, "fget", value)


@functools.cache
def _bare() -> frozenset[str]:
    """Attributes of every layer and model, which their own code changes."""
    return frozenset({*vars(keras.Layer()), *vars(keras.Model()), "optimizer", "stop_training", "history"})


def _of_library(of: object) -> bool:
    return str(getattr(of, "__module__", getattr(of, "__name__", ""))).partition(".")[0] in _LIBRARIES


def _read(name: str, value: object, found: dict[str, object], seen: set[int]) -> None:
    if isinstance(value, _SCALARS):
        found[name] = repr(value)
        return
    if isinstance(value, _SKIPPED) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, np.ndarray) or tf.is_tensor(value):
        if hasattr(value, "numpy") or isinstance(value, np.ndarray):
            array = np.asarray(value)
            found[name] = f"an array {array.shape} of checksum {checksum(array)}"
    elif isinstance(value, types.MethodType):
        _read(name, value.__func__, found, seen)
        _read(f"{name}.__self__", value.__self__, found, seen)
    elif isinstance(value, functools.partial):
        _read(name, (value.func, value.args, value.keywords), found, seen)
    elif isinstance(value, types.FunctionType):
        found[name] = value
        if not _of_library(value):
            _read_names(name, value, found, seen)
    elif isinstance(value, Mapping):
        for key in sorted(map(str, value)):
            _read(f"{name}[{key!r}]", value.get(key), found, seen)
    elif isinstance(value, list | tuple):
        found[name] = f"a sequence of {len(value)}"
        for place, each in enumerate(value[:_MOST_ELEMENTS]):
            _read(f"{name}[{place}]", each, found, seen)
    else:
        found[name] = type(value)
        settings = hasattr(value, "get_config") or hasattr(value, "__dataclass_fields__")
        if settings or isinstance(value, types.SimpleNamespace):
            for attribute, part in sorted(getattr(value, "__dict__", {}).items()):
                if not attribute.endswith(("built", "_build_input_shape", "_variables")):
                    _read(f"{name}.{attribute}", part, found, seen)


def checksum(array: np.ndarray) -> int:
    """Of an array's bytes, in place: a loss may see data of any size."""
    if array.dtype.hasobject:
        return zlib.crc32(array.tobytes())
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _read_names(name: str, function: types.FunctionType, found: dict[str, object], seen: set[int]) -> None:
    """What a function of the program reads: default values, its closure, globals."""
    _read(f"a default of {name}", (function.__defaults__, function.__kwdefaults__), found, seen)
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            _read(f"{variable!r} in {name}", cell.cell_contents, found, seen)
        except ValueError:  # not set
            continue
    codes = [function.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        for variable in code.co_names:
            if variable in function.__globals__:
                value = function.__globals__[variable]
                _read(f"{variable!r} in {name}", value, found, seen)
                if isinstance(value, types.ModuleType | type) and not _of_library(value):
                    parts = ((each, vars(value).get(each)) for each in code.co_names)
                    found |= {f"{variable}.{each}": repr(part) for each, part in parts if isinstance(part, _SCALARS)}
