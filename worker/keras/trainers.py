"""What runs instead of `keras.Model.fit` and `train_on_batch` for models with tables in a store."""

from __future__ import annotations

from collections.abc import Callable

from elastable.embedding_store.errors import Unsupported

__all__ = ["Trainer", "register_trainers", "trainer"]

Trainer = Callable[..., object]
"""Takes the model and then the arguments of the Keras method."""

_trainers: dict[str, Callable[[], Trainer]] = {}


def register_trainers(**loaders: Callable[[], Trainer]) -> None:
    """Sets the replacement for methods of `keras.Model`, by name; each loader is called with the first call."""
    _trainers.update(loaders)


def trainer(name: str) -> Trainer:
    """The replacement for a method of `keras.Model`; raises `Unsupported` if none is registered."""
    if name not in _trainers:
        raise Unsupported(f"model.{name} cannot train tables that live in a store: import elastable first")
    return _trainers[name]()
