"""Who trains a model with tables in a store when a method of Keras is called; registered by the package above."""

from __future__ import annotations

from collections.abc import Callable

from elastable.embedding_store.errors import Unsupported

__all__ = ["Trainer", "register_trainers", "trainer"]

Trainer = Callable[..., object]
"""Takes the model and then what the method of Keras takes."""

_found: dict[str, Callable[[], Trainer]] = {}


def register_trainers(**named: Callable[[], Trainer]) -> None:
    """Says who trains, by the name of the method of `keras.Model`.

    Args:
        named: Each loads what is called in the place of that method, when it is first called.
    """
    _found.update(named)


def trainer(name: str) -> Trainer:
    """Who is called in the place of a method of `keras.Model`.

    Raises:
        Unsupported: nobody.
    """
    if name not in _found:
        raise Unsupported(f"model.{name} cannot train tables that live in a store: import elastable first")
    return _found[name]()
