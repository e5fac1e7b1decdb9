"""Helpers for Keras callbacks: type check, batch hooks, history."""

from collections.abc import Sequence

import keras

from elastable.embedding_store.errors import Unsupported

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
