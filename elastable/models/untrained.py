"""Warns of tables that training never reaches."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import keras

from elastable.master.keras.discovery import store_backed_layers

__all__ = ["UntrainedTables"]

_log = logging.getLogger(__name__)

_VERSIONS = 10


class UntrainedTables:
    """Finds the embedding layers whose tables had no gradient in the first versions, and names them once.

    Frozen layers (`trainable=False`) are not warned of.

    Args:
        model: The model that is trained.
        versions: Versions after which a table should have had a gradient.
    """

    def __init__(self, model: keras.Model, versions: int = _VERSIONS) -> None:
        self._model = model
        self._left, self._versions = versions, versions
        self._updated: set[str] = set()

    def saw(self, updated: Iterable[str], overflowed: bool = False) -> None:
        """A version has been committed that changed these tables; warns with the last of the first versions.

        One whose gradient overflowed changes no table, whatever it looked up: it says nothing.
        """
        if not self._left or overflowed:
            return
        self._updated.update(updated)
        self._left -= 1
        if not self._left:
            self._warn()

    def end(self) -> None:
        """An epoch is over: one of fewer versions is judged by what there was, unless each of them overflowed."""
        if 0 < self._left < self._versions:
            self._left = 0
            self._warn()

    def _warn(self) -> None:
        for layer in store_backed_layers(self._model):
            if layer.table_name not in self._updated and getattr(layer, "trainable", True):
                _log.warning(
                    "embedding layer %r: its table %r has had no gradient so far: either nothing that the loss is "
                    "computed from looks its rows up, or all bags and lists of ids that it was given were empty. Set "
                    "trainable=False on the layer if that is meant",
                    layer.name,
                    layer.table_name,
                )
