"""`keras.Model.fit` and `train_on_batch` for models with tables in a store.

Keras' own train step cannot train a table in a store. So both methods are wrapped once, when the first store-backed
layer is imported: models without such layers run Keras' own method, models with them run what the package above has
registered. `evaluate`, `predict` and the other methods stay Keras' own and read rows through the layers; what they are
given is checked before (`elastable.worker.rows.model_inputs`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import keras

from elastable.worker.keras.seeds import layers_of
from elastable.worker.keras.trainers import trainer

__all__ = ["has_tables_in_store", "wrap_method", "wrap_model_methods"]

_WRAPPED = ("fit", "train_on_batch")
_MARK = "_elastable_wraps"


def has_tables_in_store(model: keras.Model) -> bool:
    """Whether a layer of the model, built or not, has its table in a store."""
    return any(hasattr(layer, "table_spec") and not layer.on_worker for layer in layers_of(model))


def wrap_model_methods() -> None:
    """Wraps the methods of `keras.Model` that train; a second call changes nothing."""
    for name in _WRAPPED:
        wrap_method(name, functools.partial(_training, name))


def wrap_method(name: str, made: Callable[[Callable[..., object]], Callable[..., object]]) -> None:
    """Replaces a method of `keras.Model` by what `made` makes of it; a second call changes nothing."""
    plain = getattr(keras.Model, name)
    if not hasattr(plain, _MARK):
        method = made(plain)
        setattr(method, _MARK, plain)
        setattr(keras.Model, name, method)


def _training(name: str, plain: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(plain)
    def method(self: keras.Model, *args: object, **kwargs: object) -> object:
        if not has_tables_in_store(self):
            return plain(self, *args, **kwargs)
        return trainer(name)(self, *args, **kwargs)

    return method
