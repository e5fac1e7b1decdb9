"""Calls that wait for a version of a store: one thread watches for all of them, while there are any."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import ElastableError
from elastable.embedding_store.support.futures import Timers, at_once, settle, settle_error

__all__ = ["VersionWaits"]

_WATCH_S = 1.0  # that the thread stays in one wait: whether anybody waits still


class VersionWaits:
    """The waits for versions of one store. Safe to use from many threads.

    A store that is not notified of commits is asked once, as `RowSource.wait_for_version` says.

    Args:
        store: Whose versions are waited for.
    """

    def __init__(self, store: EmbeddingStore) -> None:
        self._store = store
        self._timers = Timers("elastable-version-waits")
        self._lock = threading.Lock()
        self._waiting: dict[int, set[Future[None]]] = {}
        self._watching = False

    def when(self, version: int, wait_s: float) -> Future[None]:
        """Done once the store is at that version, or after `wait_s` seconds."""
        if wait_s <= 0 or self._store.version() >= version:
            return at_once(None)
        result: Future[None] = Future()
        with self._lock:
            self._waiting.setdefault(version, set()).add(result)
            start, self._watching = not self._watching, True
        timer = self._timers.call_at(time.monotonic() + wait_s, lambda: settle(result, None))

        def over(_: object) -> None:
            timer.cancel()
            with self._lock:
                waiting = self._waiting.get(version, set())
                waiting.discard(result)
                if not waiting:
                    self._waiting.pop(version, None)

        result.add_done_callback(over)
        if start:
            threading.Thread(target=self._watch, name="elastable-versions", daemon=True).start()
        return result

    def _watch(self) -> None:
        """Until nobody waits."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._watching = False
                    return
            try:
                version = self._store.version()
                waits = self._await_next(version)
            except ElastableError as error:
                for result in self._of(None):
                    settle_error(result, error)
                continue
            for result in self._of(version if waits else None):
                settle(result, None)

    def _await_next(self, version: int) -> bool:
        """Waits for the version after that one, for a while; False where the store does not wait."""
        if self._of(version):
            return True
        began = time.monotonic()
        return self._store.wait_for_version(version + 1, _WATCH_S) or time.monotonic() - began > _WATCH_S / 2

    def _of(self, version: int | None) -> list[Future[None]]:
        """Those that wait for that version or one before; None: all."""
        with self._lock:
            return [
                result
                for wanted, waiting in self._waiting.items()
                if version is None or wanted <= version
                for result in waiting
            ]
