"""Notes between checkpoints what commits do to the touches of rows that they do not change."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

from elastable.embedding_store.contract.spec import TableSpec
from elastable.master.checkpoints.storage.aged_touches import AgedTouches

__all__ = ["TouchHistory"]


class TouchHistory:
    """Notes `AgedTouches` of every table with eviction, commit by commit, from checkpoint to checkpoint.

    `add` and `take` are called by the thread that commits; `give_back` by any.

    Args:
        specs: Of the tables.
    """

    def __init__(self, specs: Mapping[str, TableSpec]) -> None:
        self._every = {name: spec.eviction.every for name, spec in specs.items() if spec.eviction is not None}
        self._lock = threading.Lock()
        self._since = self._nothing()

    def add(self, version: int, frozen: Collection[str]) -> None:
        """A commit was made, in which these tables were frozen."""
        with self._lock:
            for name, every in self._every.items():
                if name not in frozen:
                    self._since[name] = self._since[name].then(AgedTouches(version, not version % every))

    def take(self) -> dict[str, AgedTouches]:
        """What happened since the last call, by table; starts anew."""
        with self._lock:
            taken, self._since = self._since, self._nothing()
            return taken

    def give_back(self, taken: Mapping[str, AgedTouches]) -> None:
        """The checkpoint of this failed: the next one has to tell it, too."""
        with self._lock:
            self._since = {name: taken[name].then(newer) for name, newer in self._since.items()}

    def _nothing(self) -> dict[str, AgedTouches]:
        return dict.fromkeys(self._every, AgedTouches())
