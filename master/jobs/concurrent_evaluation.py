"""An evaluation of one version while later ones are trained."""

from __future__ import annotations

import logging

from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.engine import PinKeeper
from elastable.master.api import DenseSnapshot

__all__ = ["LEASE_S", "ConcurrentEvaluation"]

_log = logging.getLogger(__name__)

#: Seconds that the pin of a master that died outlives it at most.
LEASE_S = 30.0
_RENEW_EVERY_S = LEASE_S / 6


class ConcurrentEvaluation:
    """Keeps the rows and the dense part of a version readable until `end`.

    Args:
        snapshot: The dense part of the version.
        pin: Keeps its rows readable; taken over.
        renew_every_s: Seconds from one renewal of the pin to the next.
    """

    def __init__(self, snapshot: DenseSnapshot, pin: Snapshot, renew_every_s: float = _RENEW_EVERY_S) -> None:
        self.snapshot = snapshot
        self._keeper = PinKeeper(pin, renew_every_s, f"the evaluation of version {snapshot.version}")

    def readable(self) -> bool:
        """Whether the version is still readable, as far as is known."""
        if self._keeper.gone is None:
            return True
        _log.warning("the evaluation of version %d is given up: %s", self.snapshot.version, self._keeper.gone)
        return False

    def end(self) -> None:
        """Releases the version."""
        self._keeper.close()
