"""A pin renewed for as long as somebody reads there."""

from __future__ import annotations

import logging
import threading

from elastable.embedding_store.closing import Closing
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.errors import ElastableError, StaleVersion

__all__ = ["PinKeeper"]

_log = logging.getLogger(__name__)


class PinKeeper(Closing):
    """Renews a pin in a thread of its own until it is closed, and releases it then.

    A pin that is gone nevertheless is noticed by whoever reads there next, or asks here.

    Args:
        pin: Taken over.
        every_s: A fraction of its lease, in seconds.
        what: It is for, in the log.
    """

    def __init__(self, pin: Snapshot, every_s: float, what: str) -> None:
        self.pin = pin
        self._every_s = every_s
        self._what = what
        self._gone: StaleVersion | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="elastable-pin-keeper", daemon=True)
        self._thread.start()

    @property
    def gone(self) -> StaleVersion | None:
        """Why the version is not readable any more, as a renewal was told; None while it is, as far as is known."""
        return self._gone

    def close(self) -> None:
        """Ends the thread and releases the pin. Closing twice is harmless."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join()
        try:
            self.pin.close()
        except ElastableError as error:
            _log.warning("the pin for %s ends with its lease: %s", self._what, error)

    def _renew(self) -> None:
        while not self._over.wait(self._every_s):
            try:
                self.pin.renew()
            except StaleVersion as gone:
                self._gone = gone
                return
            except ElastableError as error:
                # The store may answer again before the lease ends.
                _log.warning("the pin for %s was not renewed: %s", self._what, error)
