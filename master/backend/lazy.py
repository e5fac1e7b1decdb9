"""TensorFlow, imported when the first of its names is used: a process on another backend never does."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["LazyModule", "tf"]


class LazyModule(ModuleType):
    """Stands for a module until a name of it is used."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(import_module(self.__name__), name)
        setattr(self, name, value)  # the next time Python finds it at once
        return value


if TYPE_CHECKING:
    import tensorflow as tf
else:
    tf = LazyModule("tensorflow")
