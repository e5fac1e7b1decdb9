"""Writing behind: changed rows go to the tier by and by, and the log is trimmed after them."""

import logging
import threading
import time
from collections.abc import Callable

from elastable.embedding_store.contract.row_data import FlushStatus
from elastable.embedding_store.engine.tiered.store_state import StoreState
from elastable.embedding_store.engine.tiered.store_tier import StoreTier
from elastable.embedding_store.errors import DeadlineExceeded, ElastableError, Unavailable
from elastable.embedding_store.support.readers_writer_lock import ReadersWriterLock

_log = logging.getLogger(__name__)

_LOG_SHARE = 2  # a pass begins when the log has grown to one part in so many of what it may take: a hot row that
# changed in many versions is written once, and there is room for what is committed meanwhile
_PAUSE_AFTER_FAILURE_S = 1.0

DEFAULT_EVERY_S = 5.0
"""Seconds between two times that changed rows are written."""


class Flusher:
    """Writes changed rows of a store to its tier on a thread, in passes.

    A pass notes the state of the store, then writes every row that has changed by then, some at a time, as it is when
    its turn comes; at last it keeps the state in the tier and trims the log up to it.
    """

    def __init__(
        self,
        tier: StoreTier,
        lock: ReadersWriterLock,
        state: Callable[[], StoreState],
        may_write: Callable[[], bool],
        *,
        every_s: float,
        log_bytes: int,
        timeout_s: float,
    ) -> None:
        """Begins.

        Args:
            tier: What is written.
            lock: Of the store.
            state: The store as it is; called while the lock is held.
            may_write: Whether its version is one that cannot be taken back any more; likewise.
            every_s: Seconds between two passes, while rows change.
            log_bytes: What the log may take; beyond it, commits wait.
            timeout_s: Seconds that a commit waits for that.
        """
        self._tier, self._lock, self._describe, self._may_write = tier, lock, state, may_write
        self._every_s, self._log_bytes, self._timeout_s = every_s, log_bytes, timeout_s
        self._changed = threading.Condition()
        self._wanted = False
        self._stopping = False
        self._passes = 0
        self._waits, self._waited_s = 0, 0.0
        self._failure: ElastableError | None = None
        self._thread = threading.Thread(target=self._run, name="elastable-flush", daemon=True)
        self._thread.start()

    @property
    def wanted(self) -> bool:
        """Whether it is time for a pass."""
        return self._wanted or self._tier.log.bytes * _LOG_SHARE > self._log_bytes

    def status(self, version: int) -> FlushStatus:
        """How far the tier is behind; the store is held, and has this version."""
        kept, failure = self._tier.kept, self._failure
        flushed = 0 if kept is None else kept.version
        return FlushStatus(
            version,
            flushed,
            self._tier.changed,
            self._tier.log.bytes,
            self._waits,
            self._waited_s,
            None if failure is None else str(failure),
        )

    def wait_for_room(self) -> None:
        """Returns once the log may grow; the store must not be held.

        Raises:
            Unavailable, DeadlineExceeded: the tier cannot be written, or not fast enough.
        """
        if not self._wanted and (self.wanted or self._tier.pressed):
            with self._changed:
                self._wanted = True
                self._changed.notify_all()
        if self._has_room():
            return
        begun = time.monotonic()
        with self._changed:
            self._waits += 1
            there = self._changed.wait_for(lambda: self._stopping or self._has_room(), self._timeout_s)
            self._waited_s += time.monotonic() - begun
        if not there:
            failure = self._failure
            what = f"the log has reached log_bytes ({self._log_bytes:,}), and {self._tier.place} "
            if failure is not None:
                raise Unavailable(f"{what}cannot be written: {failure}") from failure
            raise DeadlineExceeded(f"{what}has not taken enough rows within {self._timeout_s:g} s")

    def _has_room(self) -> bool:
        """Whether the log may grow: it is small enough, or has nothing that the tier lacks, as its last entry stays."""
        kept, log = self._tier.kept, self._tier.log
        return log.bytes <= self._log_bytes or (kept is not None and kept.sequence >= log.last)

    def flush(self, timeout_s: float) -> None:
        """Returns once everything that was committed before is in the tier; the store must not be held.

        Raises:
            ElastableError: it cannot be written.
            DeadlineExceeded: it is not there yet.
        """
        with self._changed:
            # A pass that is under way may have begun before the last commit.
            wanted, self._failure = self._passes + 2, None
            self._wanted = True
            self._changed.notify_all()
            give_up = time.monotonic() + timeout_s
            while self._passes < wanted and self._failure is None and not self._stopping:
                self._wanted = True
                self._changed.notify_all()
                if (
                    not self._changed.wait(min(1.0, max(0.0, give_up - time.monotonic())))
                    and time.monotonic() > give_up
                ):
                    raise DeadlineExceeded(f"{self._tier.place} has not taken every row within {timeout_s:g} s")
            if self._failure is not None:
                raise self._failure

    def stop(self) -> None:
        """Ends the thread, after the write that is under way. Stopping twice is harmless."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        pause = self._every_s
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._stopping, pause)
                if self._stopping:
                    return
                self._wanted = False
            pause = self._every_s
            try:
                self._pass()
                failure = None
            except ElastableError as error:
                failure, pause = error, _PAUSE_AFTER_FAILURE_S
                if self._failure is None:
                    _log.warning("%s: rows are not written, and the log grows: %s", self._tier.place, error)
            except Exception as error:  # noqa: BLE001 - the thread must go on, and commits hear of it
                _log.exception("%s: rows are not written any more", self._tier.place)
                failure = Unavailable(f"writing rows failed: {error!r}")
                pause = _PAUSE_AFTER_FAILURE_S
            with self._changed:
                self._failure = failure
                self._passes += 1
                self._changed.notify_all()

    def _pass(self) -> None:
        with self._lock.reading():
            if not self._may_write():
                return
            self._tier.acknowledge()
            if not self._tier.behind:
                return
            begun, state, retired = self._tier.begun, self._describe(), self._tier.names.retired()
            cursors = dict.fromkeys(self._tier.tables(), 0)
        if self._tier.log.keeps_entries:
            self._tier.log.sync()  # rows must not outlive the log that they come from
        while any(cursor >= 0 for cursor in cursors.values()):
            with self._lock.reading():
                if self._stopping or not self._may_write() or self._tier.begun != begun:
                    return
                self._tier.begin_writing()
                captured, sequence = self._tier.capture(cursors), self._tier.log.last
            self._tier.write(captured, sequence)
        with self._lock.reading():
            if self._tier.begun != begun:  # the state is none of the store's any more, or a newer one is kept
                return
            self._tier.begin_writing()
        self._tier.keep_behind(state, retired)
