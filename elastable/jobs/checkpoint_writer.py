"""Checkpoints of a job, written from a pinned version while training goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine import PinKeeper
from elastable.embedding_store.errors import CheckpointError, ElastableError, StaleVersion, Unsupported
from elastable.embedding_store.support.retry import retry
from elastable.master.api import Tensor
from elastable.master.tasks.progress import Progress
from elastable.monitoring.checkpoint_log import CheckpointLog

__all__ = ["Begin", "CheckpointWriter"]

_log = logging.getLogger(__name__)

# A master that takes the place of one that died waits for its pins.
_LEASE_S = 30.0
_RENEW_EVERY_S = 5.0

Begin = Callable[[Snapshot, Mapping[str, Tensor], Progress], Callable[[], str]]
"""Begins a checkpoint of (rows, dense tensors, progress); what it returns writes it, and returns where it is."""


class CheckpointWriter:
    """Writes one checkpoint at a time, in a separate thread.

    Where one is due while the one before it is being written, training waits: none is left out. One that fails is
    warned of, and the next one is tried: hours of training are not to end because a disk is full for a while. If its
    pin was given up, training waits while the next one is written. The last one of a job raises.

    Args:
        store: Holds the rows.
        begin: Begins a checkpoint, in the thread that commits (`CheckpointSeries.begin`).
        deadline_s: How long the last one of a job is tried again while the store fails.
        log: Where each of them is noted; None: nowhere.
    """

    def __init__(
        self, store: EmbeddingStore, begin: Begin, deadline_s: float = 60.0, log: CheckpointLog | None = None
    ) -> None:
        self._noted = log or CheckpointLog()
        self._store = store
        self._deadline_s = deadline_s
        self._begin = begin
        self._thread = ThreadPoolExecutor(1, "elastable-checkpoint")
        self._writing: Future[None] | None = None
        self._outrun = False

    def begin(self, dense: Mapping[str, Tensor], progress: Progress) -> None:
        """Begins to write the current version; call it between two commits."""
        self.wait()
        version = progress.version
        try:
            pin = None if self._outrun else self._store.pin(version, _LEASE_S)
        except Unsupported:
            pin = None
        except ElastableError as error:
            self._failed(version, time.monotonic(), f", it cannot be pinned: {error}")
            return
        if pin is None:
            self._warned(lambda: self._begin(self._store, dense, progress)(), version)
            return
        try:
            write = self._begin(pin, dense, progress)
        except ElastableError as error:
            self._failed(version, time.monotonic(), f": {error}")
            pin.close()
            return
        self._writing = self._thread.submit(self._from_pin, pin, write, version)

    def finish(self, dense: Mapping[str, Tensor], progress: Progress) -> str:
        """Writes the last version of a job, when nothing is committed any more; returns where it is.

        Raises:
            CheckpointError: it cannot be written.
            StoreFailed, Unavailable: the store failed until the deadline.
        """
        self.wait()
        begun = time.monotonic()
        place = retry(lambda: self._begin(self._store, dense, progress)(), "the last checkpoint", self._deadline_s)
        self._written(progress.version, begun, place)
        return place

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def close(self) -> None:
        """Waits for what is being written, and ends the thread."""
        self.wait()
        self._thread.shutdown()

    def _from_pin(self, pin: Snapshot, write: Callable[[], str], version: int) -> None:
        with PinKeeper(pin, _RENEW_EVERY_S, f"the checkpoint of version {version}"):
            self._warned(write, version)

    def _warned(self, write: Callable[[], str], version: int) -> None:
        self._outrun = False
        begun = time.monotonic()
        try:
            place = write()
        except StaleVersion as error:
            # Training changed more rows meanwhile than may be kept: it waits for the next one.
            self._outrun = True
            self._failed(version, begun, f": {error}")
        except CheckpointError as error:
            self._failed(version, begun, f": {error}")
        except ElastableError as error:
            self._failed(version, begun, f", the store failed: {error}")
        else:
            self._written(version, begun, place)

    def _written(self, version: int, begun: float, place: str) -> None:
        seconds = time.monotonic() - begun
        _log.info("checkpoint of version %d written in %.2f s: %s", version, seconds, place, extra={"version": version})
        self._noted.note(version, seconds, place)

    def _failed(self, version: int, begun: float, why: str) -> None:
        _log.warning("no checkpoint of version %d%s", version, why, extra={"version": version})
        self._noted.note_failure(version, time.monotonic() - begun, why.lstrip(":, "))
