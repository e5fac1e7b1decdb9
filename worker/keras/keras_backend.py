"""Checks the backend before Keras is imported, and names what runs as soon as it is."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from elastable.embedding_store.errors import Unsupported


def keras_backend() -> str:
    """The backend that Keras runs on, or would if it were imported now: KERAS_BACKEND, else keras.json."""
    keras = sys.modules.get("keras")
    if keras is not None and hasattr(keras, "config"):
        return str(keras.config.backend())
    if os.environ.get("KERAS_BACKEND"):
        return os.environ["KERAS_BACKEND"]
    home = os.environ.get("KERAS_HOME") or Path("~/.keras").expanduser()
    try:
        found = json.loads((Path(home) / "keras.json").read_text()).get("backend")
    except (OSError, ValueError, AttributeError):
        found = None  # Keras ignores such a file, too
    return str(found or "tensorflow")


_BACKENDS = ("tensorflow", "jax", "torch")


def require_backend(name: str = "Elastable's layers", on_any: bool = True) -> None:
    """Refuses a backend that something does not run on.

    Args:
        name: What it is, for the message.
        on_any: Whether it runs on JAX and PyTorch, too.

    Raises:
        Unsupported: Keras runs on another backend.
    """
    backend, able = keras_backend(), _BACKENDS if on_any else _BACKENDS[:1]
    if backend not in able:
        raise Unsupported(
            f"{name}: runs on Keras' backend {' or '.join(able)}, and Keras is set to {backend!r}: set "
            f"KERAS_BACKEND={able[0]} before anything imports Keras"
        )


def when_keras_is_imported(run: Callable[[], object]) -> None:
    """Calls `run` once Keras is imported: now, if it is; with a backend that nothing here runs on never."""
    keras = sys.modules.get("keras")
    if keras is None:

        def load_and_run(load: Callable[[ModuleType], None], module: ModuleType) -> None:
            load(module)
            _run_on_known(run)

        sys.meta_path.insert(0, ImportHook("keras", load_and_run))
    elif hasattr(keras, "config"):  # else it is being imported now, and imports this package
        _run_on_known(run)


def _run_on_known(run: Callable[[], object]) -> None:
    if keras_backend() in _BACKENDS:
        with suppress(ImportError):  # the error of what is missing says which extra brings it
            run()


class ImportHook(MetaPathFinder):
    """Finds a module where Python does, and calls `run(load, module)`, which loads it, when it is imported."""

    def __init__(self, name: str, run: Callable[[Callable[[ModuleType], None], ModuleType], None]) -> None:
        self._name, self._run = name, run

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = partial(self._run, load)  # type: ignore[method-assign]
        return spec


# What runs instead of `keras.Model.fit` and `train_on_batch`


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
