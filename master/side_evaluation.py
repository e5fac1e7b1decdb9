"""An evaluation of one version beside the training of later ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from embedding_store.errors import ElastableError, StaleVersion
from embedding_store.pins import Pin
from master.api import DenseSnapshot

__all__ = ["LEASE_S", "SideEvaluation"]

_log = logging.getLogger(__name__)

#: Of the pin: it outlives a master that died by no more.
LEASE_S = 30.0
_RENEW_EVERY_S = LEASE_S / 6


class SideEvaluation:
    """Holds what an evaluation reads, rows and dense part, at its version.

    Args:
        snapshot: The dense part of the version.
        pin: Keeps its rows readable; taken over.
        now: Monotonic clock, in seconds.
    """

    def __init__(self, snapshot: DenseSnapshot, pin: Pin, now: Callable[[], float] = time.monotonic) -> None:
        self.snapshot = snapshot
        self._pin = pin
        self._now = now
        self._renewed = now()

    def keep(self) -> bool:
        """Renews the pin when it is time; False once the version is not readable any more."""
        if self._now() - self._renewed < _RENEW_EVERY_S:
            return True
        try:
            self._pin.renew()
        except StaleVersion as gone:
            _log.warning("the evaluation of version %d is given up: %s", self.snapshot.version, gone)
            return False
        except ElastableError as error:
            # A store that is away may come back before the lease ends; its commits say so louder.
            _log.warning("the pin of version %d was not renewed: %s", self.snapshot.version, error)
            return True
        self._renewed = self._now()
        return True

    def end(self) -> None:
        """Lets go of the version."""
        try:
            self._pin.release()
        except ElastableError as error:
            _log.warning("the pin of version %d ends with its lease: %s", self.snapshot.version, error)
