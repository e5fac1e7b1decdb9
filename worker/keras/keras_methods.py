"""Keras' own methods for models with tables in a store, those that are replaced for a while, and its callbacks."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import keras
import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.errors import Unsupported
from elastable.master.backend.contract import backend
from elastable.master.backend.lazy import tf
from elastable.worker.keras.keras_backend import trainer
from elastable.worker.keras.same_optimizer import note_training
from elastable.worker.keras.seeds import in_stateless_scope, layers_of

_WRAPPED = ("fit", "train_on_batch")
_STATE_TREES = ("get_state_tree", "set_state_tree")
_MARK = "_elastable_wraps"
_BUILT_WITH = "_elastable_built_with"
_SLOT_OF = "_elastable_slot_of"
_OF_KERAS = ("gradient_accumulator", "average")  # which its optimizers assign as a program would
_assigning, _unlisted = threading.local(), threading.local()


def has_tables_in_store(model: keras.Model) -> bool:
    """Whether a layer of the model, built or not, has its table in a store."""
    return any(hasattr(layer, "table_spec") and not layer.on_worker for layer in layers_of(model))


def wrap_model_methods() -> None:
    """Wraps the methods of `keras.Model` that train, and `build` of optimizers; a second call changes nothing.

    Keras' own train step cannot train a table in a store. Models without such tables run Keras' own method, others what
    is registered (`register_trainers`). An optimizer is built for the variables alone: slots of tables are the store's.
    """
    for name in _WRAPPED:
        wrap_method(name, functools.partial(_train, name))
    wrap_method("set_weights", _set_weights)
    for name in _STATE_TREES:
        wrap_method(name, functools.partial(_refuse, name))
    optimizer = keras.optimizers.Optimizer
    wrap_method("assign", _assign, keras.Variable)
    if hasattr(keras.Layer, "_track_variables"):  # of PyTorch, as parameters of its module
        wrap_method("_track_variables", _track, keras.Layer)
    wrap_method("load_own_variables", _by_keras, optimizer)
    if keras.config.backend() == "torch":  # there, some of Keras' optimizers assign slots as a program does
        wrap_method("apply", _by_keras, optimizer)
    for kind in optimizer.__mro__:
        _wrap_build(kind)
    waiting = optimizer.__subclasses__()
    while waiting:
        kind = waiting.pop()
        _wrap_build(kind)
        waiting += kind.__subclasses__()
    optimizer.__init_subclass__ = classmethod(_wrap_build)  # of the user's own, which are made later


def built_with(optimizer: keras.optimizers.Optimizer) -> tuple[object, ...]:
    """The weights, tables among them, that an optimizer was built for; empty: no table was."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    weights: tuple[object, ...] = getattr(optimizer, _BUILT_WITH, getattr(inner, _BUILT_WITH, ()))
    return weights


def _track(plain: Callable[..., None], layer: keras.Layer) -> None:
    with rows_unlisted():
        plain(layer)


def _refuse(name: str, plain: Callable[..., object], model: keras.Model, *args: object, **kwargs: object) -> object:
    if has_tables_in_store(model):
        raise Unsupported(
            f"model {model.name!r}: {name} takes the variables of the model and its optimizer, and the slots of tables "
            "are in their store; use model.save and keras.models.load_model, or tf.train.Checkpoint(model)"
        )
    return plain(model, *args, **kwargs)


def _set_weights(plain: Callable[..., object], model: keras.Model, weights: Sequence[object]) -> None:
    try:
        plain(model, weights)
    except ValueError:
        for layer in layers_of(model):
            if hasattr(layer, "table_spec") and layer.input_dim is None:
                layer.set_weights(weights)  # refuses, and names what to write
        raise


def _train(name: str, plain: Callable[..., object], model: keras.Model, *args: object, **kwargs: object) -> object:
    if has_tables_in_store(model):
        return trainer(name)(model, *args, **kwargs)
    note_training(model)
    try:
        return plain(model, *args, **kwargs)
    finally:
        note_training(model)


def _wrap_build(kind: type[keras.optimizers.Optimizer]) -> None:
    if "build" in vars(kind):
        wrap_method("build", _build, kind)


def _build(
    plain: Callable[..., None],
    optimizer: keras.optimizers.Optimizer,
    variables: Iterable[keras.Variable],
    *args: object,
    **kwargs: object,
) -> None:
    weights = tuple(variables)
    plain(optimizer, variables_of(weights), *args, **kwargs)
    if len(variables_of(weights)) < len(weights):
        object.__setattr__(optimizer, _BUILT_WITH, weights)  # past Keras' tracking
        if any(hasattr(each, "table_name") and each.layer.optimizer is None for each in weights):
            guard_slots(optimizer)


def guard_slots(optimizer: keras.optimizers.Optimizer) -> None:
    """From now on a program cannot assign the slots of an optimizer that trains tables: theirs would stay as they are.

    Keras' optimizers assign theirs in another way, and so do files that are loaded.
    """
    for variable in getattr(optimizer, "inner_optimizer", optimizer).variables:
        if len(variable.shape) and not variable.name.endswith(_OF_KERAS):
            setattr(variable, _SLOT_OF, optimizer.name)


def _by_keras(
    plain: Callable[..., None], optimizer: keras.optimizers.Optimizer, *args: object, **kwargs: object
) -> None:
    before, _assigning.is_on = getattr(_assigning, "is_on", False), True
    try:
        plain(optimizer, *args, **kwargs)
    finally:
        _assigning.is_on = before


def _assign(plain: Callable[..., object], variable: keras.Variable, value: npt.ArrayLike) -> object:
    of = getattr(variable, _SLOT_OF, None)
    by_hand = of is not None and _is_eager() and not getattr(_assigning, "is_on", False)
    if by_hand and not np.array_equal(value, variable):
        raise Unsupported(
            f"{variable.path} of the optimizer {of!r} is assigned, and the slots of the tables that it trains, which "
            "are in their store, would stay: to begin with new slots compile the model with a new optimizer; to "
            "continue with another model's use model.save, save_weights and load_weights, or "
            "tf.train.Checkpoint(model)"
        )
    return plain(variable, value)


def _is_eager() -> bool:
    return bool(tf.executing_eagerly()) if backend().has_graphs else not in_stateless_scope()


def wrap_method(name: str, replacement: Callable[..., object], owner: type = keras.Model) -> None:
    """Replaces a method of a class of Keras; a second call changes nothing.

    Args:
        name: The method.
        replacement: Called with the plain method, the object, and the arguments of the call.
        owner: The class.
    """
    plain, by = getattr(owner, name), getattr(replacement, "func", replacement)
    if getattr(plain, _MARK, None) is by:
        return

    @functools.wraps(plain)
    def method(self: object, *args: object, **kwargs: object) -> object:
        return replacement(plain, self, *args, **kwargs)

    setattr(method, _MARK, by)
    setattr(owner, name, method)


@contextmanager
def rows_unlisted() -> Iterator[None]:
    """Within the block, in this thread, `layer.weights` and `model.weights` hold no rows of tables."""
    _unlisted.depth = getattr(_unlisted, "depth", 0) + 1
    try:
        yield
    finally:
        _unlisted.depth -= 1


def are_unlisted() -> bool:
    """Whether this thread is within `rows_unlisted`, and not in code of the model that Keras traces on JAX."""
    traced = keras.config.backend() == "jax" and in_stateless_scope()
    return bool(getattr(_unlisted, "depth", 0)) and not traced


_BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
_TEST_HOOKS = ("on_test_begin", "on_test_batch_begin", "on_test_batch_end", "on_test_end")


def require_callback(callback: keras.callbacks.Callback) -> str:
    """The name of the callback's class. Raises: Unsupported: not a Keras callback."""
    name = type(callback).__name__
    if not isinstance(callback, keras.callbacks.Callback):
        raise Unsupported(f"callback {name}: not a keras.callbacks.Callback")
    return name


def sees_batches(callbacks: Sequence[keras.callbacks.Callback]) -> bool:
    """Whether a callback has a batch hook, in its class or on the instance (`LambdaCallback`)."""
    return any(_overrides(callback, name) for callback in callbacks for name in _BATCH_HOOKS)


def test_hooks(callback: keras.callbacks.Callback) -> tuple[str, ...]:
    """The hooks of evaluation that a callback has, unless it is Keras' own."""
    own = type(callback).__module__.split(".")[0] != "keras" or isinstance(callback, keras.callbacks.LambdaCallback)
    return tuple(name for name in _TEST_HOOKS if own and _overrides(callback, name))


def history_of(callbacks: keras.callbacks.CallbackList) -> keras.callbacks.History:
    """Keras' `History` in a list made with `add_history=True`."""
    return next(callback for callback in callbacks.callbacks if isinstance(callback, keras.callbacks.History))


def _overrides(callback: keras.callbacks.Callback, name: str) -> bool:
    hook = getattr(callback, name)
    return getattr(hook, "__func__", hook) is not getattr(keras.callbacks.Callback, name)


Method = Callable[..., object]


class _Patch:
    """A method that calls the calling thread's replacement, if there is one."""

    def __init__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name
        self.plain: Method = getattr(owner, name)
        self.blocks = 0  # that use it, nested or in several threads
        self._local = threading.local()

    @property
    def replacements(self) -> list[Method]:
        """The replacements of the calling thread, the innermost last."""
        stack: list[Method] = self._local.__dict__.setdefault("stack", [])
        return stack

    def install(self) -> None:
        @functools.wraps(self.plain)  # Keras reads the arguments of `build`
        def method(*arguments: object, **options: object) -> object:
            stack = self.replacements
            return (stack[-1] if stack else self.plain)(*arguments, **options)

        setattr(self.owner, self.name, method)

    def remove(self) -> None:
        setattr(self.owner, self.name, self.plain)


# Held only while a patch is installed or removed. A block may wait for another thread's block: replicas that
# build one model each exchange rows within it.
_LOCK = threading.Lock()
_PATCHES: dict[tuple[type, str], _Patch] = {}


@contextmanager
def patched(owner: type, name: str, replacement: Method) -> Iterator[None]:
    """Within the block, calls of `owner.name` from this thread go to `replacement`.

    Calls from other threads go where they went before; blocks of several threads run side by side.

    Args:
        replacement: Called with the method as the thread saw it before, the object, and the arguments of the call.
    """
    key = (owner, name)
    with _LOCK:
        patch = _PATCHES.get(key)
        if patch is None:
            patch = _PATCHES[key] = _Patch(owner, name)
            patch.install()
        patch.blocks += 1
    stack = patch.replacements
    stack.append(functools.partial(replacement, stack[-1] if stack else patch.plain))
    try:
        yield
    finally:
        stack.pop()
        with _LOCK:
            patch.blocks -= 1
            if not patch.blocks:
                patch.remove()
                del _PATCHES[key]
