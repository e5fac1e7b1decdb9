"""What a model and its optimizers were as training began: Keras trains on with that, whatever is assigned since.

Keras traces its step once after `compile`, and the trace holds hyperparameters as numbers; an eager step reads them
again. Here a table's spec holds them too, and traces are kept like Keras' own (`kept_traces`). So a change is refused,
but for that of a learning rate, which is a variable, and, of eager models, for what their layers read.
"""

from __future__ import annotations

import enum
import functools
import types
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from elastable.embedding_store.errors import Unsupported
from elastable.worker.keras.seeds import global_generator, layers_of

_LIBRARIES = ("keras", "tensorflow", "elastable", "numpy")
_SKIPPED = (
    keras.Layer,
    keras.Variable,
    keras.Optimizer,
    keras.KerasTensor,
    keras.Initializer,
    types.ModuleType,
    type,
)
_SCALARS = (type(None), bool, int, float, complex, str, bytes, np.generic, enum.Enum)
_TF_VARIABLES = "tensorflow.python.ops.resource_variable_ops"
_MOST_ELEMENTS = 1000  # of a list; of a longer one its length counts


def traced_values(model: keras.Model) -> dict[str, object]:
    """Name, as `layer 'dropout'.rate` -> a function, or what is written of a value."""
    found: dict[str, object] = {}
    for name, part in _parts(model):
        _read(name, part, found, set())
    return found


def changed_value(model: keras.Model, before: Mapping[str, object]) -> str | None:
    """The name of a value that is not what it was."""
    now = traced_values(model) if before else {}
    for name, value in before.items():
        if name in now and now[name] != value:
            return name
    return None


def _parts(model: keras.Model) -> Iterator[tuple[str, object]]:
    bare, names = _bare(), set()
    for number, layer in enumerate(layers_of(model)):
        name = f"layer {layer.name!r}" if layer.name not in names else f"layer {layer.name!r} (layer {number})"
        names.add(layer.name)
        yield f"{name}.dtype", layer.dtype_policy.name
        for attribute, value in _of_own_classes(layer):
            yield f"{name}.{attribute}", value
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
    for key in ("loss_weights", "metrics", "weighted_metrics"):
        yield key, config.get(key)


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
    kind = type(value)
    if isinstance(value, _SKIPPED) or id(value) in seen or kind.__module__ == _TF_VARIABLES:
        return
    seen.add(id(value))
    if isinstance(value, np.ndarray) or keras.ops.is_tensor(value):
        if hasattr(value, "numpy") or isinstance(value, np.ndarray):
            array = np.asarray(value)
            found[name] = f"an array {array.shape} of checksum {_checksum(array)}"
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
        found[name] = kind
        settings = hasattr(value, "get_config") or hasattr(value, "__dataclass_fields__")
        if settings or isinstance(value, types.SimpleNamespace):
            for attribute, part in sorted(getattr(value, "__dict__", {}).items()):
                if not attribute.endswith(("built", "_build_input_shape", "_variables")):
                    _read(f"{name}.{attribute}", part, found, seen)


def _checksum(array: np.ndarray) -> int:
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


_BEGAN = "_elastable_training_began"
_COMPILE_AGAIN = "call model.compile(...) again, with this optimizer or a new one"


def optimizers_of(model: keras.Model, planned: Iterable[keras.Optimizer] = ()) -> list[keras.Optimizer]:
    """The optimizers that train a model, each once: of `compile()`, of its tables, and of its own `train_step`."""
    found = {id(model.optimizer): model.optimizer}
    for layer in layers_of(model):
        if hasattr(layer, "table_spec") and (own := getattr(layer, "optimizer", None)) is not None:
            found[id(own)] = own
    for each in planned:
        found[id(each)] = each
    found.pop(id(None), None)
    return list(found.values())


class Hyperparameters:
    """What the steps of an optimizer are made of now, but for its learning rate."""

    def __init__(self, optimizer: keras.Optimizer) -> None:
        self.optimizer = optimizer
        self._values = _values(optimizer)

    def require(self, of: str, remedy: str = _COMPILE_AGAIN) -> None:
        """Raises `Unsupported` where they are others now.

        Args:
            of: What is trained, for the message.
            remedy: What to do instead.
        """
        now, before = _values(self.optimizer), self._values
        if now == before:
            return
        name = next(name for name in {**before, **now} if now.get(name) != before.get(name))
        raise Unsupported(
            f"{of}: {name} of the optimizer {self.optimizer.name!r} was changed from {before.get(name)} to "
            f"{now.get(name)} after training began: {remedy}"
        )


def _values(optimizer: keras.Optimizer) -> dict[str, str]:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate = inner._learning_rate
    if callable(rate) and not isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return {"learning_rate": repr(rate)}  # refused as soon as its steps are needed
    config: dict[str, object] = inner.get_config()
    changing: dict[str, object] = {"name": None, "learning_rate": None}
    if callable(rate):
        changing |= {"learning_rate": rate, "the schedule": config["learning_rate"]}
    excluded = {
        "exclude_from_weight_decay(var_names)": getattr(inner, "_exclude_from_weight_decay_pattern", None),
        "exclude_from_weight_decay(var_list)": getattr(inner, "_exclude_from_weight_decay", None),
    }
    scaling = {} if optimizer is inner else {"dynamic_growth_steps": optimizer.dynamic_growth_steps}
    values = {**config, **changing, **excluded, **scaling}
    return dict(zip(values, map(repr, values.values()), strict=True))


@dataclass(frozen=True, slots=True)
class _Began:
    """How training began since a model was compiled.

    Attributes:
        compiled: What `compile()` makes anew, also for an optimizer that it is given again.
        optimizer: Of `compile()`.
        kept: id -> what it was, of all that train the model.
        values: As of `traced_values`, as its step was traced; empty: it runs eagerly.
        by_keras: It was Keras' own training, which may have had optimizers that are not known here.
        traces: Of the steps that train it, as of `kept_traces`.
        traced: What these traces were made of.
    """

    compiled: object
    optimizer: keras.Optimizer
    kept: dict[int, Hyperparameters]
    values: dict[str, object] = field(default_factory=dict)
    by_keras: bool = False
    traces: dict[object, Any] = field(default_factory=dict)
    traced: list[object] = field(default_factory=list)


def runs_eagerly(model: keras.Model) -> bool:
    """Whether Keras reads a model anew with every batch: as it was compiled, and on PyTorch but for `jit_compile`."""
    return bool(model.run_eagerly or (keras.config.backend() == "torch" and not model.jit_compile))


def kept_traces(model: keras.Model) -> dict[object, Any]:
    """The traces of a model's steps, and what was checked before, which the next `fit` goes on with until `compile`.

    They are dropped where they would read other variables than the model's: its weights were replaced, a table became a
    variable or moved to a store, or Keras' global generator was seeded again. None is kept of an eager model.

    Returns:
        A key of the caller's -> what was traced; to be added to.
    """
    began: _Began | None = getattr(model, _BEGAN, None)
    if began is None or runs_eagerly(model) or began.compiled is not getattr(model, "_compile_config", None):
        return {}
    now: list[object] = [global_generator(), *model.variables]
    for layer in layers_of(model):
        if hasattr(layer, "table_spec"):
            now += [layer, layer.table_name, layer.on_worker, layer.embeddings_initializer]
    if list(map(id, now)) != list(map(id, began.traced)):  # they are held, so that no other object gets their ids
        began.traced[:] = now
        began.traces.clear()
    return began.traces


def _begins(model: keras.Model, planned: Iterable[keras.Optimizer], by_keras: bool) -> bool:
    """Whether training begins now; then what it begins with is kept."""
    compiled = getattr(model, "_compile_config", None)
    began: _Began | None = getattr(model, _BEGAN, None)
    if began is not None and compiled is not None and began.compiled is compiled and began.optimizer.built:
        return False
    kept = {id(each): Hyperparameters(each) for each in optimizers_of(model, planned)}
    began = _Began(compiled, model.optimizer, kept, by_keras=by_keras)
    object.__setattr__(model, _BEGAN, began)  # past Keras' tracking
    return True


def note_training(model: keras.Model, elsewhere: bool = False) -> None:
    """Called before Keras' own training of a model, and after it, where tables may move to a store later.

    Args:
        model: If it is compiled.
        elsewhere: Other processes train it: they see no change, also where it runs eagerly.
    """
    if model.compiled and model.optimizer is not None:
        _begins(model, [each for each in vars(model).values() if isinstance(each, keras.Optimizer)], by_keras=True)
        if model.built and (elsewhere or not runs_eagerly(model)):
            _note_values(model)


def _note_values(model: keras.Model) -> None:
    began: _Began = getattr(model, _BEGAN)
    if not began.values:
        began.values.update(traced_values(model))


def require_same_values(model: keras.Model) -> None:
    """Called as a step is about to be traced.

    Raises:
        Unsupported: what a trace since `compile()` holds of the model is another value now.
    """
    began: _Began | None = getattr(model, _BEGAN, None)
    if began is None or (runs_eagerly(model) and not began.values):
        return
    if name := changed_value(model, began.values):
        old, new = (getattr(each, "__name__", each) for each in (began.values[name], traced_values(model)[name]))
        raise Unsupported(
            f"model {model.name!r}: {name} was changed from {old} to {new} after training began, and Keras would train "
            f"on with {old}: call model.compile(...) again before the next fit, with this optimizer or a new one"
        )
    _note_values(model)


def require_same_optimizer(model: keras.Model, planned: Iterable[keras.Optimizer] = ()) -> None:
    """Called as training begins, with the optimizers that it is for.

    Args:
        model: A compiled model.
        planned: As of `optimizers_of`.

    Raises:
        Unsupported: another optimizer has trained the model since it was compiled, or the same one with other
            hyperparameters: plain Keras trains on with those.
    """
    planned = list(planned)
    if _begins(model, planned, by_keras=False):
        return
    began: _Began = getattr(model, _BEGAN)
    for each in optimizers_of(model, planned):
        kept = began.kept.get(id(each))
        if kept is None and began.by_keras and began.optimizer is model.optimizer:
            kept = began.kept.setdefault(id(each), Hyperparameters(each))
        if kept is None or began.optimizer is not model.optimizer:
            raise Unsupported(
                f"model {model.name!r}: its optimizer was replaced by {each.name!r} after it had trained, and Keras "
                "would go on with the old one; write model.compile(optimizer=..., loss=...) with the new one"
            )
        kept.require(f"model {model.name!r}")
